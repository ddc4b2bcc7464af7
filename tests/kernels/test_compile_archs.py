"""What the compiler makes of every kernel for Ampere, Hopper and Blackwell, and of attention's sizes and dtypes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kernels import compile_cases
from tests.kernels.compile_cases import ELSEWHERE, decode, kernel_names, prefill

ARCHS = (80, 90, 100)
HEAD_DIMS = (64, 80, 128, 256)
NEEDS_FP8 = {"_quantize_kernel"}  # beside the cases of kernels that take other numbers as well


def is_possible(given: dict[str, Any], arch: int) -> bool:
    """sm_80 converts no fp8, so the settings are refused there (`fp8.is_fp8_capable`)."""
    return arch > 80 or not (
        given["kernel"] in NEEDS_FP8 or "fp8" in json.dumps(given) or "float8" in json.dumps(given)
    )


def one_of_each_kernel(arch: int) -> dict[str, dict[str, Any]]:
    """The first of a kernel's cases in `compile_cases`, which has the others for Hopper; of products every one."""
    found: dict[str, dict[str, Any]] = {}
    kernels: set[str] = set()
    for name, given in compile_cases.CASES.items():
        is_new = given["kernel"] not in kernels or name.startswith(("linear", "grouped"))
        if "sm_" not in name and is_new and is_possible(given, arch):
            kernels.add(given["kernel"])
            found[f"{name}, sm_{arch}"] = {**given, "arch": arch}
    return found


CASES = {name: given for arch in ARCHS for name, given in one_of_each_kernel(arch).items()}
CASES |= {
    f"{make.__name__}, head_dim {head_dim}, {dtype}, sm_{arch}": make(arch, head_dim, dtype=dtype)
    for make in (decode, prefill)
    for head_dim in HEAD_DIMS
    for arch in ARCHS
    for dtype in ("bfloat16", "float16")
    if dtype == "bfloat16" or arch == 90
}
CASES |= {
    f"{make.__name__}, window, head_dim {head_dim}, sm_{arch}": make(arch, head_dim, window=4096)
    for make in (decode, prefill)
    for head_dim in (64, 128)
    for arch in ARCHS
}
ATTENTION = [name for name in CASES if name.split(", ")[1] in ("window", *(f"head_dim {size}" for size in HEAD_DIMS))]
# Bytes of registers that are spilled: known, and not to become more. All others spill nothing.
SPILLED = {
    "sample, choice, sm_80": 8,
    "decode, head_dim 80, bfloat16, sm_90": 8,
    "decode, head_dim 80, float16, sm_90": 8,
    "prefill, head_dim 256, bfloat16, sm_80": 32,
    "prefill, head_dim 256, float16, sm_80": 32,
    "prefill, window, head_dim 128, sm_80": 56,
}


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_is_compiled(arch: int) -> None:
    found = {given["kernel"] for given in CASES.values() if given["arch"] == arch}
    assert found == kernel_names() - ELSEWHERE - (NEEDS_FP8 if arch == 80 else set())


@pytest.mark.parametrize("name", CASES)
def test_nothing_spills(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["stack_bytes"] <= SPILLED.get(name, 0)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_multi_buffered_on_tensor_cores(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    """Of two stages, as prefill's of 256 dimensions, Ampere holds one tile while it copies the next."""
    report = compiled[name]
    least = 1 if name.startswith("prefill, head_dim 256") and name.endswith("sm_80") else 2
    assert min(report["num_buffers"]) >= least
    assert report["has_tensor_core"]
    assert report["has_wgmma"] == (name.startswith("prefill") and name.endswith("sm_90"))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("linear", "grouped"))])
def test_products_are_multi_buffered_on_tensor_cores(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    report = compiled[name]
    assert min(report["num_buffers"]) >= 2
    assert report["has_tensor_core"]
    assert report["has_wgmma"] == name.endswith("sm_90")
