"""What is compiled of the kernels of adapters: launches of an 8B's shapes, as `compiling` records them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from cb_backend.kernels.launch import overriding
from cb_backend.kernels.lora_plan import AdapterPlan, new_plan

CPU = torch.device("cpu")
MAX_ADAPTERS = 4  # nothing is compiled for their number but the plan


def _plan(tile_rows: int) -> AdapterPlan:
    return new_plan(2, MAX_ADAPTERS, tile_rows, torch.device("cpu"))


def _strided(*size: int) -> torch.Tensor:
    """An adapter's weights among others of the slab."""
    return torch.zeros(MAX_ADAPTERS, 2 * torch.Size(size).numel(), dtype=torch.bfloat16)[
        :, : torch.Size(size).numel()
    ].unflatten(1, size)


def _lora(
    module: Any,
    op: str,
    tile_rows: int,
    rank: int,
    slices: tuple[int, ...],
    in_size: int,
    parameters: dict[str, int] | None = None,
    is_gelu: bool = False,
) -> None:
    plan, columns = _plan(tile_rows), len(slices) * rank
    with overriding(op, parameters) if parameters else contextlib.nullcontext():
        if op == "lora_shrink":
            module.lora_shrink(torch.zeros(2, in_size).bfloat16(), _strided(columns, in_size), plan)
            return
        y, scales = torch.zeros(2, sum(slices)).bfloat16(), torch.zeros(MAX_ADAPTERS, len(slices))
        # Of a case that was JSON the slices are a list.
        arguments = (y, torch.zeros(8, 2, columns), _strided(sum(slices), rank), scales, tuple(slices), plan)
        if op == "lora_expand_gated":
            module.lora_expand_gated(*arguments, is_gelu)
        else:
            module.lora_expand(*arguments)


def _lora_plan(module: Any, num_decode: int, num_prompts: int, max_adapters: int) -> None:
    ints = torch.zeros(num_decode + num_prompts + 1, dtype=torch.int32)
    num_prefill = 2048 * (num_prompts > 0)
    with overriding("lora_plan", {"tile_rows": 16}):
        module.plan_adapters(ints, num_decode, ints[:num_prompts], ints, num_prefill, ints, max_adapters)


def _linear_shrink(module: Any, tile_rows: int, num_rows: int, parameters: dict[str, int], shrink: Any = None) -> None:
    x, weight = torch.zeros(num_rows, 4096).bfloat16(), torch.zeros(4096, 4096).bfloat16()
    with overriding("linear", parameters), overriding("lora_shrink", shrink) if shrink else contextlib.nullcontext():
        module.linear_shrink(
            x, weight, None, None, _strided(48, 4096), new_plan(num_rows, MAX_ADAPTERS, tile_rows, CPU)
        )


LORA_LAUNCHES = {
    "linear_shrink": _linear_shrink,
    "lora_shrink": _lora,
    "lora_expand": _lora,
    "lora_gated": _lora,
    "lora_plan": _lora_plan,
}


def _case(
    op: str, tile_rows: int, rank: int, slices: tuple[int, ...], in_size: int = 4096, **more: bool
) -> dict[str, Any]:
    call = {"op": op, "tile_rows": tile_rows, "rank": rank, "slices": slices, "in_size": in_size, **more}
    module = "lora_gated" if op == "lora_expand_gated" else op
    return {"op": module, "kernel": f"_{op}_kernel", "arch": 90, "call": call}


def tuned_lora(op: str, when: dict[str, int], use: dict[str, int], arch: int) -> dict[str, Any]:
    """What an entry of a GPU's file serves."""
    out_size = when.get("n", 4096)
    slices = next((each for each in (_QKV, _GATE_UP) if sum(each) == out_size), (out_size,))
    if op == "lora_expand_gated":
        slices = (out_size, out_size)
    found = _case(op, when["m"], 16, slices, when.get("k", 4096))
    return {**found, "arch": arch, "call": {**found["call"], "parameters": use}}


def _plan_case(**call: int) -> dict[str, Any]:
    return {"op": "lora_plan", "kernel": "_plan_adapters_kernel", "arch": 90, "call": call}


_QKV, _GATE_UP = (4096, 1024, 1024), (14336, 14336)
LORA_CASES: dict[str, dict[str, Any]] = {
    "lora_shrink": _case("lora_shrink", 16, 16, _QKV),
    "lora_shrink, 64 rows": _case("lora_shrink", 64, 16, _QKV),
    "lora_shrink, down": _case("lora_shrink", 16, 16, (4096,), 14336),
    "lora_shrink, rank 64": _case("lora_shrink", 32, 64, _GATE_UP),
    "lora_expand": _case("lora_expand", 16, 16, _QKV),
    "lora_expand, 64 rows": _case("lora_expand", 64, 16, _GATE_UP),
    "lora_expand, rank 64": _case("lora_expand", 16, 64, _GATE_UP),
    "lora_expand, rank 128, 64 rows": _case("lora_expand", 64, 128, _GATE_UP),
    "lora_expand, rank 512": _case("lora_expand", 32, 512, _GATE_UP),
    "lora_shrink, rank 512": _case("lora_shrink", 32, 512, _GATE_UP),
    "lora_expand_gated": _case("lora_expand_gated", 16, 16, _GATE_UP),
    "lora_expand_gated, 64 rows": _case("lora_expand_gated", 64, 16, _GATE_UP),
    "lora_expand_gated, gelu": _case("lora_expand_gated", 32, 16, _GATE_UP, is_gelu=True),
    "lora_expand_gated, one slice": _case("lora_expand_gated", 64, 32, (28672,)),
    "lora_expand_gated, rank 64": _case("lora_expand_gated", 16, 64, _GATE_UP),
    "lora_expand_gated, rank 128, 64 rows": _case("lora_expand_gated", 64, 128, _GATE_UP),
    "lora_expand_gated, rank 512": _case("lora_expand_gated", 32, 512, _GATE_UP),
    "lora_plan": _plan_case(num_decode=256, num_prompts=0, max_adapters=8),
    "lora_plan, prompts": _plan_case(num_decode=64, num_prompts=16, max_adapters=32),
    "lora_plan, many prompts": _plan_case(num_decode=64, num_prompts=64, max_adapters=256),
}  # fmt: skip
