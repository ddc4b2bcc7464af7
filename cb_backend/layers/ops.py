"""The kernels a model runs on, chosen once at start-up.

Layers call `ops.rms_norm(...)` and never ask which backend they are on. `torch` are the twins: the CPU path and the
specification; `triton` are the kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cb_backend.kernels import decode_attention, prefill_attention, qkv_post, rms_norm, sample, silu_mul

Op = Callable[..., Any]  # signatures: the kernel's module in cb_backend/kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One function an operation; all of one backend."""

    backend: str  # triton | torch
    rms_norm: Op
    add_rms_norm: Op
    silu_mul: Op
    qkv_post: Op
    decode_attention: Op
    prefill_attention: Op
    sample: Op


TORCH_OPS = Ops(
    backend="torch",
    rms_norm=rms_norm.rms_norm_torch,
    add_rms_norm=rms_norm.add_rms_norm_torch,
    silu_mul=silu_mul.silu_mul_torch,
    qkv_post=qkv_post.qkv_post_torch,
    decode_attention=decode_attention.decode_attention_torch,
    prefill_attention=prefill_attention.prefill_attention_torch,
    sample=sample.sample_torch,
)


def resolve_ops(backend: str) -> Ops:
    """The ops of `torch` or `triton`. Raises `ConfigError` for another name or where triton is not installed."""
    if backend == "torch":
        return TORCH_OPS
    if backend != "triton":
        raise ConfigError(f"attention backend is {backend!r}; use torch or triton")
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("attention backend is 'triton' but the package triton is not installed; use 'torch'")
    return Ops(
        backend="triton",
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        silu_mul=silu_mul.silu_mul,
        qkv_post=qkv_post.qkv_post,
        decode_attention=decode_attention.decode_attention,
        prefill_attention=prefill_attention.prefill_attention,
        sample=sample.sample,
    )
