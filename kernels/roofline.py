"""The least bytes and arithmetic of each kernel, for the three models the figures are given for.

A kernel reads each input once and writes each output once; the larger of bytes / bandwidth and operations / rate is its
floor. What a whole step or workload needs at least is `cb_backend.study.roofline`, whose formulae run on these
shapes.
As a program it prints decode floors: `python kernels/roofline.py [--bandwidth 3.0e12] [--flops 790e12]`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cb_backend.kv_cache.layout import bytes_per_token
from cb_backend.study.roofline import CardLimits, ModelShape, decode_seconds

MODELS = {
    "qwen3-0.6b": ModelShape(
        num_layers=28, hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=128, intermediate_size=3072,
        vocab_size=151936,
    ),
    "llama-3.2-1b": ModelShape(
        num_layers=16, hidden_size=2048, num_heads=32, num_kv_heads=8, head_dim=64, intermediate_size=8192,
        vocab_size=128256,
    ),
    "llama-3.1-8b": ModelShape(
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14336,
        vocab_size=128256,
    ),
}  # fmt: skip
HAS_QK_NORM = {"qwen3-0.6b"}
ELEMENT = 2  # bytes of bf16


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch cannot do without."""

    num_bytes: float
    flops: float = 0.0

    def seconds(self, card: CardLimits) -> float:
        return max(self.num_bytes / card.bandwidth, self.flops / card.flops)


def add_rms_norm(shape: ModelShape, num_tokens: int) -> Work:
    """x and the residual in, the normed row and the new residual out."""
    return Work(ELEMENT * (4 * num_tokens * shape.hidden_size + shape.hidden_size))


def silu_mul(shape: ModelShape, num_tokens: int) -> Work:
    return Work(ELEMENT * 3 * num_tokens * shape.intermediate_size)


def qkv_post(shape: ModelShape, num_tokens: int) -> Work:
    """Every head in and out once, and an fp32 row of the cos/sin table a token."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    return Work(num_tokens * (ELEMENT * 2 * heads * shape.head_dim + 4 * shape.head_dim))


def decode_attention(shape: ModelShape, num_rows: int, context: int, kv_bytes: int = ELEMENT) -> Work:
    """Keys and values (of `kv_bytes` an element) of every context token; 4 FLOP a query head, dimension and token."""
    kv = num_rows * context * bytes_per_token(1, shape.num_kv_heads, shape.head_dim, kv_bytes)
    q_and_out = ELEMENT * 2 * num_rows * shape.num_heads * shape.head_dim
    return Work(kv + q_and_out, 4.0 * num_rows * context * shape.num_heads * shape.head_dim)


def prefill_attention(
    shape: ModelShape, num_requests: int, query_len: int, context: int, kv_bytes: int = ELEMENT
) -> Work:
    """Causal pairs only: each query sees the context before the chunk and its own part of the chunk."""
    pairs = num_requests * (query_len * (context - query_len) + query_len * (query_len + 1) / 2)
    kv = num_requests * context * bytes_per_token(1, shape.num_kv_heads, shape.head_dim, kv_bytes)
    q_and_out = ELEMENT * 2 * num_requests * query_len * shape.num_heads * shape.head_dim
    return Work(kv + q_and_out, 4.0 * pairs * shape.num_heads * shape.head_dim)


def sample(shape: ModelShape, num_rows: int) -> Work:
    """One read of the logits, whatever is asked of them."""
    return Work(ELEMENT * num_rows * shape.vocab_size)


def lora(
    in_size: int, slices: tuple[int, ...], num_rows: int, active: int, rank: int, *, is_gated: bool = False
) -> Work:
    """A and B of every adapter in use once; the rows in, and what they are added to in and out (half of it, gated)."""
    weights = active * rank * (len(slices) * in_size + sum(slices))
    out_size = sum(slices) // (1 + is_gated)
    return Work(
        ELEMENT * (weights + num_rows * (in_size + sum(slices) + out_size)),
        2.0 * num_rows * rank * (len(slices) * in_size + sum(slices)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode floors in ms a step and tokens a second.")
    parser.add_argument("--bandwidth", type=float, default=3.0e12, help="bytes/s of a device copy, read and written")
    parser.add_argument("--flops", type=float, default=790e12, help="FLOP/s of a large bf16 product")
    arguments = parser.parse_args()
    card = CardLimits(arguments.bandwidth, arguments.flops)
    print(f"{'model':14} {'batch':>5} {'context':>7} {'ms':>8} {'tokens/s':>9}")
    for name, shape in MODELS.items():
        for context in (512, 2048):
            for num_rows in (1, 32, 128, 256):
                seconds = decode_seconds(shape, card, num_rows, num_rows * context)
                print(f"{name:14} {num_rows:5} {context:7} {1e3 * seconds:8.2f} {num_rows / seconds:9.0f}")


if __name__ == "__main__":
    main()
