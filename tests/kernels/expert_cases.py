"""What is compiled of the kernels of experts: launches of their shapes, as `compiling` records them."""

from __future__ import annotations

from typing import Any

import torch

from cb_backend.kernels.expert_plan import ExpertPlan, max_blocks
from cb_backend.kernels.exponents import exponents_of
from cb_backend.kernels.launch import overriding
from cb_backend.kernels.packed import pack
from cb_backend.kernels.route import Routing

NUM_EXPERTS = 4  # nothing is compiled for their number but the plan and the routing


def _plan(num_pairs: int, block_m: int) -> ExpertPlan:
    bound = max_blocks(num_pairs, NUM_EXPERTS, block_m)
    pairs, experts, num_blocks = (torch.zeros(size, dtype=torch.int32) for size in (bound * block_m, bound, 1))
    return ExpertPlan(pairs, experts, num_blocks, num_pairs, NUM_EXPERTS, block_m)


def _grouped_linear(
    module: Any,
    op: str,
    parameters: dict[str, int],
    block_m: int,
    size: int = 768,
    hidden: int = 2048,
    activation: str = "silu",
    has_bias: bool = False,
) -> None:
    """Two tokens of 8 experts each; size: of the experts."""
    plan = _plan(16, block_m)
    with overriding(op, parameters):
        if op == "grouped_gate_up":
            bias = torch.zeros(NUM_EXPERTS, 2 * size, dtype=torch.bfloat16) if has_bias else None
            x, weight = torch.zeros(2, hidden), torch.zeros(NUM_EXPERTS, 2 * size, hidden)
            module.grouped_gate_up(x.bfloat16(), weight.bfloat16(), plan, 8, activation, bias)
        else:
            bias = torch.zeros(NUM_EXPERTS, hidden, dtype=torch.bfloat16) if has_bias else None
            x, weight = torch.zeros(16, size), torch.zeros(NUM_EXPERTS, hidden, size)
            out = torch.zeros(2, 8, hidden, dtype=torch.bfloat16)
            module.grouped_down(x.bfloat16(), weight.bfloat16(), plan, torch.zeros(2, 8), out, bias)


def _grouped_packed(
    module: Any,
    op: str,
    parameters: dict[str, int],
    block_m: int,
    kind: str,
    group: int,
    size: int = 768,
    hidden: int = 2048,
    activation: str = "silu",
    has_bias: bool = False,
    dtype: str = "bfloat16",
) -> None:
    kind_of_x = getattr(torch, dtype)
    plan, is_gated = _plan(16, block_m), op == "grouped_gate_up"
    rows, columns = (2 * size, hidden) if is_gated else (hidden, size)
    stored = torch.zeros(rows, columns, dtype=torch.uint8)
    scales = torch.zeros(rows, -(-columns // group), dtype=torch.float32 if kind == "fp8" else torch.bfloat16)
    one = pack(stored, scales, kind, group, is_gated=is_gated)
    words = exponents_of(one.scales) if (kind, group) == ("fp4", 32) else None
    values, scales = (
        each.expand(NUM_EXPERTS, *each.shape) for each in (one.values, one.scales if words is None else words)
    )
    weight = module.PackedExperts(values, scales, None, kind, one.group, (rows, columns), is_gated)
    bias = torch.zeros(NUM_EXPERTS, rows, dtype=torch.bfloat16) if has_bias else None
    with overriding(op, parameters):
        if is_gated:
            module.grouped_gate_up_packed(torch.zeros(2, hidden, dtype=kind_of_x), weight, plan, 8, activation, bias)
        else:
            out = torch.zeros(2, 8, hidden, dtype=kind_of_x)
            x = torch.zeros(16, size, dtype=kind_of_x)
            module.grouped_down_packed(x, weight, plan, torch.zeros(2, 8), out, bias)


def _gate_rows(module: Any, size: int) -> None:
    x = torch.zeros(2, size, dtype=torch.bfloat16)
    module.gate_rows(x, torch.zeros(2, 5, dtype=torch.bfloat16)[:, 4], x.clone())


def _route(module: Any, num_experts: int, routing: dict[str, Any], has_bias: bool = False) -> None:
    logits = torch.zeros(2, num_experts, dtype=torch.float32 if has_bias else torch.bfloat16)
    score_bias = torch.zeros(num_experts) if has_bias else None
    parts = torch.zeros(2, 8, 2048, dtype=torch.bfloat16)
    module.route(logits, torch.ones(2, dtype=torch.int32), parts, Routing(**routing), score_bias)


def _plan_experts(module: Any, num_experts: int, num_tokens: int, num_here: int | None = None) -> None:
    module.plan_experts(torch.zeros(num_tokens, 8, dtype=torch.int32), num_experts, num_here=num_here)


def _route_few(module: Any, num_experts: int, num_tokens: int, routing: dict[str, Any]) -> None:
    parts = torch.zeros(num_tokens, 8, 2048, dtype=torch.bfloat16)
    logits = torch.zeros(num_tokens, num_experts, dtype=torch.bfloat16)
    module.route_experts(logits, torch.ones(num_tokens, dtype=torch.int32), parts, Routing(**routing))


EXPERT_LAUNCHES = {
    "grouped_linear": _grouped_linear, "route": _route, "expert_plan": _plan_experts, "route_experts": _route_few,
    "grouped_packed": _grouped_packed, "gate_rows": _gate_rows,
}  # fmt: skip


def grouped(op: str, block_m: int, parameters: dict[str, int], arch: int = 90, **given: Any) -> dict[str, Any]:
    call = {"op": op, "parameters": parameters, "block_m": block_m, **given}
    return {"op": "grouped_linear", "kernel": "_grouped_linear_kernel", "arch": arch, "call": call}


def packed(op: str, block_m: int, parameters: dict[str, int], kind: str, group: int, **given: Any) -> dict[str, Any]:
    call = {"op": op, "parameters": parameters, "block_m": block_m, "kind": kind, "group": group, **given}
    return {"op": "grouped_packed", "kernel": "_grouped_packed_kernel", "arch": given.pop("arch", 90), "call": call}


def packed_tiles(block_n: int, num_warps: int, num_stages: int) -> dict[str, int]:
    return {"block_n": block_n, "num_warps": num_warps, "num_stages": num_stages}


_OSS = {"kind": "fp4", "group": 32, "size": 2880, "hidden": 2880, "has_bias": True}


def tiles(block_n: int, block_k: int, num_warps: int, num_stages: int) -> dict[str, int]:
    return {"block_n": block_n, "block_k": block_k, "num_warps": num_warps, "num_stages": num_stages}


EXPERT_CASES: dict[str, dict[str, Any]] = {
    "grouped_gate_up": grouped("grouped_gate_up", 16, tiles(64, 128, 4, 3)),
    "grouped_gate_up, 4 stages": grouped("grouped_gate_up", 16, tiles(64, 128, 4, 4)),
    "grouped_gate_up, 128 rows": grouped("grouped_gate_up", 128, tiles(64, 64, 8, 4)),
    "grouped_gate_up, clamped": grouped(
        "grouped_gate_up", 16, tiles(64, 64, 4, 3), activation="clamped_swiglu", has_bias=True, size=2880, hidden=2880
    ),
    "grouped_down": grouped("grouped_down", 16, tiles(64, 128, 4, 4)),
    "grouped_down, 128 rows": grouped("grouped_down", 128, tiles(128, 64, 8, 4)),
    "packed_gate_up, mxfp4": packed(
        "grouped_gate_up", 16, packed_tiles(128, 4, 4), activation="clamped_swiglu", **_OSS
    ),
    "packed_gate_up, mxfp4, 128 rows": packed(
        "grouped_gate_up", 128, packed_tiles(128, 8, 3), activation="clamped_swiglu", **_OSS
    ),
    "packed_down, mxfp4": packed("grouped_down", 16, packed_tiles(128, 4, 4), **_OSS),
    "packed_down, fp8": packed("grouped_down", 16, packed_tiles(64, 4, 4), "fp8", 128),
    "packed_gate_up, fp8, 64 rows": packed("grouped_gate_up", 64, packed_tiles(64, 4, 4), "fp8", 128),
    "packed_gate_up, int4": packed("grouped_gate_up", 16, packed_tiles(128, 4, 4), "int4", 128),
    "gate_rows": {"op": "gate_rows", "kernel": "_gate_rows_kernel", "arch": 90, "call": {"size": 2048}},
    "rms_norm, of parts": {"op": "rms_norm", "kernel": "_rms_norm_kernel", "arch": 90,
                           "call": {"hidden_size": 2880, "num_parts": 8}},
    "route": {"op": "route", "kernel": "_route_kernel", "arch": 90,
              "call": {"num_experts": 128, "routing": {"top_k": 8, "renormalise": True}}},
    "route, groups": {"op": "route", "kernel": "_route_kernel", "arch": 90, "call": {
        "num_experts": 256, "has_bias": True,
        "routing": {"top_k": 8, "scoring": "sigmoid", "num_groups": 8, "top_groups": 4}}},
    "route, spread": {"op": "route", "kernel": "_route_kernel", "arch": 90, "call": {
        "num_experts": 128, "routing": {"top_k": 8, "renormalise": True, "first_here": 64, "num_here": 64}}},
    "route few": {"op": "route_experts", "kernel": "_route_few_kernel", "arch": 90, "call": {
        "num_experts": 128, "num_tokens": 1, "routing": {"top_k": 8, "renormalise": True}}},
    "route few, of the best": {"op": "route_experts", "kernel": "_route_few_kernel", "arch": 90, "call": {
        "num_experts": 32, "num_tokens": 1, "routing": {"top_k": 4, "scoring": "softmax_of_top_k"}}},
    "plan_experts": {"op": "expert_plan", "kernel": "_plan_experts_kernel", "arch": 90,
                     "call": {"num_experts": 128, "num_tokens": 64}},
    "plan_experts, spread": {"op": "expert_plan", "kernel": "_plan_experts_kernel", "arch": 90,
                             "call": {"num_experts": 128, "num_tokens": 64, "num_here": 64}},
    "plan_experts, many tokens": {"op": "expert_plan", "kernel": "_plan_experts_kernel", "arch": 90,
                                  "call": {"num_experts": 256, "num_tokens": 2048}},
}  # fmt: skip
