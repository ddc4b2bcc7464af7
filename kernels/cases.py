"""The launches that are measured: inputs at the three models' shapes, and how to call kernel and twin on them.

Inputs are random and come in several sets, so that repeated launches read device memory and not the L2 cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import roofline
from roofline import HAS_QK_NORM, MODELS, Work

from cb_backend.kernels.decode_attention import decode_attention, decode_attention_torch
from cb_backend.kernels.fp8 import FP8
from cb_backend.kernels.lora_expand import lora_expand, lora_expand_torch
from cb_backend.kernels.lora_gated import lora_expand_gated, lora_expand_gated_torch
from cb_backend.kernels.lora_plan import plan_adapters
from cb_backend.kernels.lora_shrink import lora_shrink, lora_shrink_torch
from cb_backend.kernels.prefill_attention import prefill_attention, prefill_attention_torch
from cb_backend.kernels.qkv_post import qkv_post, qkv_post_torch
from cb_backend.kernels.rms_norm import add_rms_norm, add_rms_norm_torch
from cb_backend.kernels.row_sampling import neutral_rows
from cb_backend.kernels.sample import sample, sample_torch
from cb_backend.kernels.silu_mul import silu_mul, silu_mul_torch
from cb_backend.kv_cache.layout import layout_of

DTYPE = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # nothing is timed on a CPU, but the cases can be tried
CACHE_BYTES = 192 << 20  # the input sets of a case are larger than this together: several times an L2 cache
MAX_SETS = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a results table. `make` allocates one input set and returns the launches on it."""

    op: str
    model: str
    label: str  # the sizes, as printed
    work: Work
    make: Callable[[], Launch]
    variant: str = ""  # cases of one op, model and variant run the same compiled code
    peer: tuple[str, str, int, int] | None = None  # (kind, model, batch, context) in a peer's measurements

    @property
    def num_sets(self) -> int:
        return int(min(MAX_SETS, max(2, -(-CACHE_BYTES // max(self.work.num_bytes, 1)))))


@dataclass(frozen=True)
class Launch:
    """Calls on one input set. Both give the tensors to compare; the twin may see a part of them."""

    kernel: Callable[[dict[int, Tensor]], Any]  # given the plans that launches of one step share
    twin: Callable[[], Any]
    compared: Callable[[Any], list[Tensor]]  # of the kernel's result, what the twin computes too


def cases_of(op: str, models: list[str], is_quick: bool) -> Iterator[Case]:
    """The cases of an op. Raises `KeyError` for an op or a model that is not known."""
    make = {
        "rms_norm": _row_cases,
        "silu_mul": _row_cases,
        "qkv_post": _row_cases,
        "decode_attention": _decode_cases,
        "decode_attention_fp8": _decode_cases,
        "prefill_attention": _prefill_cases,
        "prefill_attention_fp8": _prefill_cases,
        "sample": _sample_cases,
        "lora": _lora_cases,
    }[op]
    for model in models:
        yield from make(op, model, is_quick)


# With _fp8: over an fp8 cache.
OPS = (
    "rms_norm", "silu_mul", "qkv_post", "decode_attention", "decode_attention_fp8", "prefill_attention",
    "prefill_attention_fp8", "sample", "lora",
)  # fmt: skip
VALUE_SCALE = 0.25  # of an fp8 cache; another than 1 shows in the comparison with the twin


def _row_cases(op: str, model: str, is_quick: bool) -> Iterator[Case]:
    shape = MODELS[model]
    work = {"rms_norm": roofline.add_rms_norm, "silu_mul": roofline.silu_mul, "qkv_post": roofline.qkv_post}[op]
    make = {"rms_norm": _make_rms_norm, "silu_mul": _make_silu_mul, "qkv_post": _make_qkv_post}[op]
    for tokens in (1, 256, 2048) if is_quick else (1, 32, 256, 2048, 8192):
        yield Case(
            op=op, model=model, label=f"tokens {tokens}", work=work(shape, tokens),
            make=lambda tokens=tokens: make(model, tokens),
        )  # fmt: skip


def _randn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def _make_rms_norm(model: str, tokens: int) -> Launch:
    hidden = MODELS[model].hidden_size
    x, residual, weight = _randn(tokens, hidden), _randn(tokens, hidden), _randn(hidden)
    return Launch(
        lambda plans: add_rms_norm(x, residual, weight, 1e-6),
        lambda: add_rms_norm_torch(x, residual, weight, 1e-6),
        list,
    )


def _make_silu_mul(model: str, tokens: int) -> Launch:
    gate_up = _randn(tokens, 2 * MODELS[model].intermediate_size)
    return Launch(lambda plans: silu_mul(gate_up), lambda: silu_mul_torch(gate_up), lambda out: [out])


def _make_qkv_post(model: str, tokens: int) -> Launch:
    shape = MODELS[model]
    heads, dim = shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim
    block_size = 16
    num_blocks = tokens // block_size + 2
    block = layout_of(shape, block_size, DTYPE.itemsize).layer_shape
    caches = [torch.zeros(num_blocks, *block, dtype=DTYPE, device=DEVICE)] * 2
    caches[1] = caches[0].clone()
    norm = _randn(dim) if model in HAS_QK_NORM else None
    arguments = (
        _randn(tokens, heads * dim),
        torch.rand(4096, dim, device=DEVICE),
        torch.randint(0, 4096, (tokens,), dtype=torch.int32, device=DEVICE),
        (torch.randperm(tokens, device=DEVICE) + block_size).int(),
    )
    sizes = (shape.num_heads, shape.num_kv_heads, dim, norm, norm)
    return Launch(
        lambda plans: (qkv_post(*arguments, caches[0], *sizes), caches[0]),
        lambda: (qkv_post_torch(*arguments, caches[1], *sizes), caches[1]),
        list,
    )


def _cache_dtype(op: str) -> torch.dtype:
    return FP8 if op.endswith("_fp8") else DTYPE


def _paged(
    model: str, num_rows: int, context: int, block_size: int, kv_dtype: torch.dtype = DTYPE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """kv_cache, block_tables (shuffled), slots and seq_lens of rows of equal length."""
    shape = MODELS[model]
    per_row = -(-context // block_size)
    num_blocks = num_rows * per_row + 1
    kv_cache = _randn(num_blocks, *layout_of(shape, block_size, kv_dtype.itemsize).layer_shape).to(kv_dtype)
    tables = (torch.randperm(num_blocks - 1, device=DEVICE) + 1).int().view(num_rows, per_row)
    slots = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    return kv_cache, tables, slots, torch.full((num_rows,), context, dtype=torch.int32, device=DEVICE)


def _decode_cases(op: str, model: str, is_quick: bool) -> Iterator[Case]:
    shape = MODELS[model]
    for block_size in (16, 64) if model == "llama-3.1-8b" or not is_quick else (16,):
        for num_rows in (1, 32, 256) if is_quick else (1, 8, 32, 128, 256):
            for context in (512, 2048, 8192):
                yield Case(
                    op=op, model=model, label=f"rows {num_rows} context {context} block {block_size}",
                    work=roofline.decode_attention(shape, num_rows, context, _cache_dtype(op).itemsize),
                    make=lambda n=num_rows, c=context, b=block_size: make_decode(model, n, c, b, _cache_dtype(op)),
                    variant=f"block {block_size}",
                    peer=("decode", model, num_rows, context),
                )  # fmt: skip


def make_decode(model: str, num_rows: int, context: int, block_size: int, kv_dtype: torch.dtype = DTYPE) -> Launch:
    shape = MODELS[model]
    kv_cache, tables, slots, seq_lens = _paged(model, num_rows, context, block_size, kv_dtype)
    q, scale = _randn(num_rows, shape.num_heads, shape.head_dim), shape.head_dim**-0.5
    scaled = {"value_scale": VALUE_SCALE if kv_dtype == FP8 else 1.0}
    some = slice(0, 2)  # rows the twin is asked for: it gathers them in fp32
    return Launch(
        lambda plans: decode_attention(q, kv_cache, tables, slots, seq_lens, scale, plans=plans, **scaled),
        lambda: decode_attention_torch(q[some], kv_cache, tables, slots[some], seq_lens[some], scale, **scaled),
        lambda out: [out[some]],
    )


def _prefill_cases(op: str, model: str, is_quick: bool) -> Iterator[Case]:
    shape = MODELS[model]
    sizes = [(1, 1024, 1024), (1, 4096, 4096), (8, 1024, 1024), (1, 512, 4096)]
    if not is_quick:
        sizes += [(1, 2048, 2048), (1, 8192, 8192), (32, 128, 128)]
    for requests, query_len, context in sizes:
        yield Case(
            op=op, model=model, label=f"requests {requests} queries {query_len} context {context}",
            work=roofline.prefill_attention(shape, requests, query_len, context, _cache_dtype(op).itemsize),
            make=lambda r=requests, n=query_len, c=context: make_prefill(model, r, n, c, 16, _cache_dtype(op)),
            peer=("prefill", model, requests, context) if query_len == context else None,
        )  # fmt: skip


def make_prefill(
    model: str, requests: int, query_len: int, context: int, block_size: int, kv_dtype: torch.dtype = DTYPE
) -> Launch:
    shape = MODELS[model]
    kv_cache, tables, slots, seq_lens = _paged(model, requests, context, block_size, kv_dtype)
    starts = torch.arange(0, (requests + 1) * query_len, query_len, dtype=torch.int32, device=DEVICE)
    q, scale = _randn(requests * query_len, shape.num_heads, shape.head_dim), shape.head_dim**-0.5
    lens = {"max_query_len": query_len, "value_scale": VALUE_SCALE if kv_dtype == FP8 else 1.0}
    return Launch(
        lambda plans: prefill_attention(q, kv_cache, tables, slots, starts, seq_lens, scale, **lens),
        lambda: prefill_attention_torch(
            q[:query_len], kv_cache, tables, slots[:1], starts[:2], seq_lens[:1], scale, **lens
        ),
        lambda out: [out[:query_len]],
    )


def _sample_cases(op: str, model: str, is_quick: bool) -> Iterator[Case]:
    for num_rows in (1, 32, 256):
        for kind in ("greedy", "temperature", "top_k and top_p"):
            yield Case(
                op=op, model=model, label=f"rows {num_rows} {kind}", work=roofline.sample(MODELS[model], num_rows),
                make=lambda n=num_rows, k=kind: _make_sample(model, n, k),
                variant="filters" if "top" in kind else "",
            )  # fmt: skip


def _make_sample(model: str, num_rows: int, kind: str) -> Launch:
    is_filtered = kind == "top_k and top_p"
    seeds = torch.arange(num_rows, device=DEVICE)
    sampling = neutral_rows(num_rows, torch.device(DEVICE))
    sampling.seed.copy_(seeds)
    if kind != "greedy":
        sampling.temperature.fill_(0.8)
    if is_filtered:
        sampling.top_k.fill_(50)
        sampling.top_p.fill_(0.9)
    arguments = (3 * _randn(num_rows, MODELS[model].vocab_size), sampling, seeds + 1000, is_filtered)
    return Launch(lambda plans: sample(*arguments), lambda: sample_torch(*arguments), list)


LORA_RANK = 16


def _lora_cases(op: str, model: str, is_quick: bool) -> Iterator[Case]:
    """Shrink and expand together, as a projection launches them (gate and up with the activation); the plan is the
    step's and not in it."""
    shape = MODELS[model]
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    projections = {
        "qkv": (shape.hidden_size, (q_size, kv_size, kv_size)),
        "o": (q_size, (shape.hidden_size,)),
        "gate_up": (shape.hidden_size, (shape.intermediate_size, shape.intermediate_size)),
        "down": (shape.intermediate_size, (shape.hidden_size,)),
    }
    mixes = ((1, 1), (8, 8), (32, 32), (128, 128), (256, 8), (2048, 8))
    for name, (in_size, slices) in projections.items():
        for rows, active in ((1, 1), (32, 32), (2048, 8)) if is_quick else mixes:
            yield Case(
                op=op, model=model, label=f"{name} rows {rows} adapters {active}", variant=f"{name} {rows}",
                work=roofline.lora(in_size, slices, rows, active, LORA_RANK, is_gated=name == "gate_up"),
                make=lambda n=name, i=in_size, s=slices, r=rows, a=active: _make_lora(i, s, r, a, n == "gate_up"),
            )  # fmt: skip


def _make_lora(in_size: int, slices: tuple[int, ...], num_rows: int, active: int, is_gated: bool) -> Launch:
    """Row i goes through adapter i % active."""
    a, b = (
        _randn(active, size, inner) for size, inner in ((len(slices) * LORA_RANK, in_size), (sum(slices), LORA_RANK))
    )
    x, y, scales = (
        _randn(num_rows, in_size),
        _randn(num_rows, sum(slices)),
        torch.ones(active, len(slices), device=DEVICE),
    )
    slots = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    nobody = slots[:0]
    plan = plan_adapters(slots, num_rows, nobody, nobody, 0, slots % active, active)
    ys = [y, y.clone()]
    ops = {
        True: (lora_shrink, lora_expand, lora_expand_gated),
        False: (lora_shrink_torch, lora_expand_torch, lora_expand_gated_torch),
    }

    def launch(is_kernel: bool) -> Tensor:
        shrink, expand, expand_gated = ops[is_kernel]
        target = ys[is_kernel]
        arguments = (target, shrink(x, a, plan), b, scales, slices, plan)
        if is_gated:
            return expand_gated(*arguments)
        expand(*arguments)
        return target

    return Launch(lambda plans: launch(True), lambda: launch(False), lambda out: [out])
