"""Which products the models have, and the launch parameters worth trying on each.

Knows sizes only; `tune_linear.py` and `tune_steps.py` time them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from published_models import spec_of
from roofline import MODELS

from cb_backend.kernels.launch import next_power_of_2
from cb_backend.study.machine import model_shape

Parameters = dict[str, int]
# Rows that one compiled variant serves, so a row's result is the same in any batch of them; the first stands for all.
ROW_GROUPS = (
    (1,), (8, 2, 4, 16), (32,), (64, 48), (128, 88), (256, 144, 192), (512, 384), (1024,), (2048,), (4096,), (8192,)
)  # fmt: skip
MAX_ROWS = 256  # for which the kernels are tried
SHARED_BYTES = 227 << 10

# (block_n, block_k, num_warps), of one row
VECTOR_TILES = (
    (8, 512, 4), (4, 1024, 4), (8, 1024, 8), (4, 512, 2), (16, 256, 4), (2, 1024, 2), (4, 1024, 8), (4, 2048, 8),
    (2, 2048, 4), (2, 2048, 8), (4, 512, 4), (2, 1024, 4), (4, 2048, 4),
)  # fmt: skip
# (block_n, block_k, num_warps, num_stages)
SMALL_TILES = ((64, 128, 4, 4), (64, 64, 4, 6), (64, 256, 4, 3), (32, 256, 4, 4), (128, 64, 4, 5))
QUICK_FP8_TILES = ((64, 128, 4, 4), (64, 256, 4, 3), (32, 256, 4, 4), (128, 64, 8, 4))
LARGE_TILES = (
    (64, 128, 4, 4), (64, 64, 4, 5), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3), (256, 64, 8, 4),
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A product of some model: `op` with out_size n and in_size k."""

    op: str  # linear | linear_silu_mul, or one of these with _fp8
    n: int
    k: int
    name: str  # the first model and projection that has it
    can_have_norm: bool = False  # the addition and norm before it, of one row, can be part of its launch

    @property
    def when(self) -> dict[str, int]:
        """Of its launches, with any number of rows."""
        return {"n": self.n, "k": self.k}

    @property
    def weight_rows(self) -> int:
        return self.n * (2 if self.is_gated else 1)

    @property
    def is_gated(self) -> bool:
        return self.op.startswith("linear_silu_mul")

    @property
    def is_fp8(self) -> bool:
        return self.op.endswith("_fp8")

    @property
    def element_bytes(self) -> int:
        """Of weights and of the rows that go in."""
        return 1 if self.is_fp8 else 2

    def num_bytes(self, num_rows: int) -> int:
        """Weights and rows in, rows out; gate and up of the separate activation are not needed."""
        return self.element_bytes * (self.weight_rows + num_rows) * self.k + 2 * num_rows * self.n


def shapes_of(models: list[str]) -> list[Shape]:
    """The distinct products of the models; those of experts are not among them (`tune_grouped.py`)."""
    found: dict[tuple[str, int, int], Shape] = {}
    for model in models:
        m = MODELS[model] if model in MODELS else model_shape(spec_of(model), "bfloat16")
        attention = m.num_heads * m.head_dim
        dense = m.experts is None or m.experts.num_layers < m.num_layers
        for op, part, n, k in (
            ("linear", "qkv", attention + 2 * m.num_kv_heads * m.head_dim, m.hidden_size),
            ("linear", "o", m.hidden_size, attention),
            ("linear", "router", m.experts.num_experts if m.experts else 0, m.hidden_size),
            ("linear_silu_mul", "gate_up", m.intermediate_size if dense else 0, m.hidden_size),
            ("linear", "down", m.hidden_size if dense else 0, m.intermediate_size),
            ("linear", "lm_head", m.vocab_size, m.hidden_size),
        ):
            # What experts made comes in parts, which the norm adds up.
            can_have_norm = part == "qkv" and m.experts is None
            if n:
                found.setdefault((op, n, k), Shape(op, n, k, f"{model} {part}", can_have_norm=can_have_norm))
    return list(found.values())


def served_with(num_rows: int) -> list[int]:
    """`m` of all entries that are to be the same as that of `num_rows`. Raises `ValueError` above the last group."""
    for group in ROW_GROUPS:
        keys = {next_power_of_2(m) for m in group}
        if next_power_of_2(num_rows) in keys:
            return sorted(keys)
    raise ValueError(f"products of {num_rows} rows have no entries")


def candidates(shape: Shape, num_rows: int, num_sms: int, is_quick: bool) -> Iterator[Parameters]:
    """Launch parameters worth timing: tiles that fit, with splits that give every multiprocessor something to read."""
    if num_rows == 1 and not shape.is_fp8:
        for tile in VECTOR_TILES:
            if tile[1] > shape.k:
                continue
            vector = {"vector": 1, **dict(zip(("block_n", "block_k", "num_warps"), tile, strict=True))}
            yield from (vector, {**vector, "fold": 8})
    if num_rows >= 32:
        yield {"library": 2}
    if num_rows > MAX_ROWS:
        return
    block_m = max(16, num_rows)
    weights = shape.weight_rows // shape.n
    kinds = SMALL_TILES if num_rows <= 32 else LARGE_TILES
    if shape.is_fp8 and is_quick:
        kinds = QUICK_FP8_TILES
    for block_n, block_k, num_warps, num_stages in kinds:
        block_k *= 2 // shape.element_bytes
        if weights == 2 and block_n > 64:
            continue  # two sums of 128 columns do not fit into the registers
        if weights == 2 and num_rows >= 128:
            num_warps = 8
        if block_n * block_m * weights > 128 * 32 * num_warps:
            continue  # its sums would spill
        while shape.element_bytes * num_stages * block_k * (block_n * weights + block_m) > SHARED_BYTES:
            num_stages -= 1
        if num_stages < 2:
            continue
        tiles = -(-shape.n // block_n)
        shares = (1, 2) if is_quick else (1, 2, 3, 4)
        for splits in sorted({splits_for(tiles, num_sms * share, shape.k // block_k) for share in shares}):
            if splits > 1 and 3 * num_rows * splits > shape.k:
                continue  # its partial sums would come near to the bytes of the weights
            yield {
                "block_n": block_n, "block_k": block_k, "splits": splits,
                "num_warps": num_warps, "num_stages": num_stages,
            }  # fmt: skip


def splits_for(tiles: int, programs: int, most: int) -> int:
    """The number of splits, out of a few, that brings `tiles` nearest to `programs` without passing it by a fifth."""
    fitting = [splits for splits in (1, 2, 3, 4, 6, 8, 12, 16) if splits <= most and tiles * splits <= 1.2 * programs]
    return max(fitting, default=1)
