"""The kernels a model runs on, chosen once at start-up.

Layers and the model runner call `ops.rms_norm(...)` and never ask which backend they are on. `torch` are the twins:
the CPU path and the specification; `triton` are the kernels.
"""

from __future__ import annotations

import importlib.util
from dataclasses import make_dataclass

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels import (
    add_norm_linear,
    decode_attention,
    decode_plan,
    fp8,
    gate_rows,
    grouped_linear,
    grouped_packed,
    linear,
    linear_fp8,
    linear_packed,
    linear_shrink,
    lora_expand,
    lora_gated,
    lora_plan,
    lora_shrink,
    prefill_attention,
    qkv_post,
    rms_norm,
    route_experts,
    sample,
    silu_mul,
    slot_state,
    softcap,
    step_rows,
    token_bitmask,
    token_marks,
    top_logprobs,
)
from cb_backend.layers.op_signatures import ModelOps, Ops, StepOps

__all__ = ["ModelOps", "Ops", "StepOps", "resolve_ops"]

_MODULE_OF_OP = {
    "rms_norm": rms_norm,
    "add_rms_norm": rms_norm,
    "gelu_mul": silu_mul,
    "silu_mul": silu_mul,
    "linear": linear,
    "linear_silu_mul": linear,
    "add_norm_linear": add_norm_linear,
    "add_rms_norm_fp8": rms_norm,
    "quantize_rows": fp8,
    "linear_fp8": linear_fp8,
    "linear_silu_mul_fp8": linear_fp8,
    "linear_packed": linear_packed,
    "linear_silu_mul_packed": linear_packed,
    "route_experts": route_experts,
    "gate_rows": gate_rows,
    "grouped_gate_up": grouped_linear,
    "grouped_down": grouped_linear,
    "grouped_gate_up_packed": grouped_packed,
    "grouped_down_packed": grouped_packed,
    "lora_shrink": lora_shrink,
    "linear_shrink": linear_shrink,
    "lora_expand": lora_expand,
    "lora_expand_gated": lora_gated,
    "qkv_post": qkv_post,
    "cap_logits": softcap,
    "plan_decode": decode_plan,
    "decode_attention": decode_attention,
    "prefill_attention": prefill_attention,
    "sample": sample,
    "apply_deltas": slot_state,
    "join_slots": slot_state,
    "prepare_rows": step_rows,
    "plan_adapters": lora_plan,
    "commit_tokens": step_rows,
    "mask_stop_ids": step_rows,
    "apply_marks": token_marks,
    "apply_token_bitmask": token_bitmask,
    "top_logprobs": top_logprobs,
}
_SUFFIX_OF_BACKEND = {"torch": "_torch", "triton": ""}


# One function an operation, all of one backend: what `Ops` says, as values that can be replaced one by one.
_Table = make_dataclass("_Table", ["backend", *_MODULE_OF_OP], frozen=True, slots=True)


def resolve_ops(backend: str) -> Ops:
    """The ops of `torch` or `triton`. Raises `ConfigError` for another name or where triton is not installed."""
    if backend not in _SUFFIX_OF_BACKEND:
        raise ConfigError(f"attention_backend is {backend!r}; use one of {', '.join(_SUFFIX_OF_BACKEND)}")
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        raise ConfigError("attention_backend is 'triton' but the package triton is not installed; use 'torch'")
    suffix = _SUFFIX_OF_BACKEND[backend]
    ops: Ops = _Table(backend, *(getattr(module, op + suffix) for op, module in _MODULE_OF_OP.items()))
    return ops
