"""What the compiler makes of the launch parameters in `tuned/<gpu>.json`: those that are served with on that GPU.

A third of them, for the minutes that all take: `CB_BACKEND_ALL_ENTRIES=1 pytest tests/kernels/test_compile_tuned.py`
after a change of a kernel or of a file.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import pytest

from cb_backend.kernels import launch
from tests.kernels.compile_cases import case, decode, prefill
from tests.kernels.expert_cases import grouped, packed
from tests.kernels.lora_cases import tuned_lora

pytest.importorskip("triton")
ARCHS = {"nvidia-h100-80gb-hbm3": 90, "nvidia-h200": 90}  # of each file's GPU
MAX_SHARED_BYTES = {90: 227 << 10}  # a program
MOST_CHANNELS = 8192  # of a weight here: nothing is compiled for their number, and zeros of a head take long
FP8 = "float8_e4m3fn"


def product(op: str, arch: int, when: dict[str, int], use: dict[str, int]) -> dict[str, Any]:
    kernel = "_one_row_kernel" if "vector" in use else "_linear_kernel"
    sizes = {"num_rows": when["m"], "out_size": min(when["n"], MOST_CHANNELS), "in_size": when["k"]}
    module = "linear_fp8" if op.endswith("fp8") else "add_norm_linear" if op.startswith("add") else "linear"
    return case(module, kernel, arch, {"op": op, "parameters": use, **sizes})


def packed_product(op: str, arch: int, when: dict[str, int], use: dict[str, int]) -> dict[str, dict[str, Any]]:
    """An entry serves all numbers of so many bits, or its own kind alone; by the name of what they are."""
    cases = {}
    kinds = (("int4", 128), ("fp4", 32)) if when["bits"] == 4 else (("int8", 128), ("fp8", 128))
    is_float = when.get("is_float")
    for kind, group in kinds if is_float is None else kinds[is_float : is_float + 1]:
        call = {"op": op, "parameters": use, "num_rows": when["m"], "kind": kind, "group": group}
        kernel = "_packed_few_rows_kernel" if "pairs" in use else "_linear_packed_kernel"
        cases[kind] = case("linear_packed", kernel, arch, call)
    return cases


def cases_of(op: str, arch: int, when: dict[str, int], use: dict[str, int]) -> dict[str, dict[str, Any]]:
    """By name; none where the entry chooses a library."""
    given = ", ".join(f"{name} {value}" for name, value in when.items())
    if "library" in use:
        return {}
    if op == "plan_experts":
        return {}
    if op.startswith("grouped"):
        n, k = ("size", "hidden") if op == "grouped_gate_up" else ("hidden", "size")
        sizes = {n: when["n"], k: when["k"]} if "n" in when else {}  # else of any size
        if when["bits"] == 16:
            return {f"{op}, {given}": grouped(op, when["m"], use, arch, **sizes)}
        is_mxfp4 = {"activation": "clamped_swiglu"} if op == "grouped_gate_up" else {}
        kind = (
            {"kind": "fp4", "group": 32, "has_bias": True, **is_mxfp4}
            if when["bits"] == 4
            else {"kind": "fp8", "group": 128}
        )
        return {f"{op}, {given}": packed(op, when["m"], use, **kind, **sizes)}
    if op == "decode_attention":
        cache = {"kv_dtype": FP8} if when["kv_bytes"] == 1 else {}
        return {f"{op}, {given}": {**decode(arch, when["block_d"], **cache), "parameters": use}}
    if op == "prefill_attention":  # one entry serves both caches
        one = {f"{op}, {given}": {**prefill(arch, when["block_d"]), "parameters": use}}
        return one | {f"{op}, fp8 cache, {given}": {**prefill(arch, when["block_d"], kv_dtype=FP8), "parameters": use}}
    if op.endswith("_packed"):
        return {f"{op}, {kind}, {given}": one for kind, one in packed_product(op, arch, when, use).items()}
    if op.startswith("lora"):
        return {f"{op}, {given}": tuned_lora(op, when, use, arch)}
    found = {f"{op}, {given}": product(op, arch, when, use)}
    if "norm" in use:
        found[f"add_norm_{op}, {given}"] = product(f"add_norm_{op}", arch, when, use)
    return found


def all_cases() -> dict[str, dict[str, Any]]:
    """One of those that differ in nothing but the number of output channels or in what no kernel is compiled for."""
    cases: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for name, arch in ARCHS.items():
        for op, entries in json.loads((launch.TUNED / f"{name}.json").read_text()).items():
            for entry in entries:
                for label, given in cases_of(op, arch, entry["when"], entry["use"]).items():
                    call = {key: value for key, value in given["call"].items() if key != "out_size"}
                    parameters = {
                        key: value
                        for key, value in given.get("parameters", {}).items()
                        if key not in ("ctas_per_sm", "min_split")
                    }
                    key = json.dumps([given["op"], given["kernel"], arch, call, parameters])
                    if key not in seen:
                        seen.add(key)
                        cases[f"{name}: {label}"] = given
    return cases


# Bytes of registers that are spilled: known, and not to become more. These entries were the fastest nevertheless, but
# for prefill's with an fp8 cache, which is bfloat16's.
SPILLED = {
    "nvidia-h200: grouped_gate_up, n 768, k 2048, e 128, m 128, bits 16": 8,
    "nvidia-h200: grouped_gate_up, m 128, bits 4": 32,
    "nvidia-h200: grouped_down, m 128, bits 4": 32,
    "nvidia-h100-80gb-hbm3: prefill_attention, block_d 128, is_small 0, q_bytes 2": 48,
    "nvidia-h100-80gb-hbm3: prefill_attention, fp8 cache, block_d 128, is_small 0, q_bytes 2": 192,
    "nvidia-h100-80gb-hbm3: linear_silu_mul, n 3072, k 1024, m 32": 8,
    "nvidia-h200: linear_packed, fp4, n 6144, k 4096, m 64, bits 4, is_float 1": 8,
    "nvidia-h200: linear_packed, fp4, n 4096, k 14336, m 64, bits 4, is_float 1": 24,
    "nvidia-h200: linear_packed, int4, n 8192, k 28672, m 64, bits 4": 8,
    "nvidia-h200: linear_packed, fp4, n 8192, k 28672, m 64, bits 4": 8,
    "nvidia-h200: linear_packed, int4, n 4096, k 4096, m 128, bits 4": 16,
    "nvidia-h200: linear_packed, fp4, n 4096, k 4096, m 128, bits 4": 16,
    "nvidia-h200: linear_packed, int4, n 4096, k 14336, m 128, bits 4": 8,
    "nvidia-h200: linear_packed, fp4, n 4096, k 14336, m 128, bits 4": 8,
    "nvidia-h200: linear_packed, int8, n 4096, k 4096, m 128, bits 8": 16,
    "nvidia-h200: linear_packed, fp8, n 4096, k 4096, m 128, bits 8": 16,
    "nvidia-h200: linear_packed, int8, n 4096, k 14336, m 128, bits 8": 16,
    "nvidia-h200: linear_packed, fp8, n 4096, k 14336, m 128, bits 8": 16,
}


def is_chosen(name: str) -> bool:
    """The same ones each time, of every operation some; attention's, of which there are few, all."""
    return "attention" in name or zlib.crc32(name.encode()) % 3 == 0


CASES = all_cases()
if not os.environ.get("CB_BACKEND_ALL_ENTRIES"):
    CASES = {name: given for name, given in CASES.items() if is_chosen(name) or name in SPILLED}


def test_the_architecture_of_every_file_is_known() -> None:
    assert {path.stem for path in launch.TUNED.glob("*.json")} == {*ARCHS, "default"}


@pytest.mark.parametrize("name", CASES)
def test_nothing_spills_and_all_fits(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["stack_bytes"] <= SPILLED.get(name, 0)
    assert compiled[name]["shared_bytes"] <= MAX_SHARED_BYTES[CASES[name]["arch"]]


def parameters_of(name: str) -> dict[str, int]:
    found: dict[str, int] = CASES[name].get("parameters") or CASES[name]["call"]["parameters"]
    return found


@pytest.mark.parametrize("name", [name for name in CASES if parameters_of(name).get("num_stages", 0) >= 3])
def test_three_stages_and_more_are_multi_buffered(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["num_buffers"]
    assert min(compiled[name]["num_buffers"]) >= parameters_of(name)["num_stages"] - 1


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, given in CASES.items()
        if given["kernel"] == "_prefill_attention_kernel"
        or (given["kernel"] == "_linear_kernel" and parameters_of(name)["block_n"] >= 64)
    ],
)
def test_tiles_of_64_rows_use_warp_group_products(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["has_wgmma"]
