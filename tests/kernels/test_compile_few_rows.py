"""What the compiler makes of products of few rows with packed weights: where elements lie, which assembly relies on."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.kernels.compile_cases import ELSEWHERE, case

pytest.importorskip("triton")


def few_rows(num_rows: int, kind: str, group: int, arch: int = 90, pairs: int = 1, **given: Any) -> dict[str, Any]:
    """1,024 channels and columns; a pair is 16 rows of the weight."""
    parameters = {"pairs": pairs, "num_warps": 8, **given.pop("parameters", {})}
    op = "linear_silu_mul_packed" if given.pop("is_gated", False) else "linear_packed"
    call = {"op": op, "parameters": parameters, "num_rows": num_rows, "kind": kind, "group": group, **given}
    return case("linear_packed", "_packed_few_rows_kernel", arch, call)


CASES = {
    "int4": few_rows(8, "int4", 128),
    "int4, one row": few_rows(1, "int4", 128, pairs=2),
    "int4, 16 rows": few_rows(16, "int4", 128, pairs=2),
    "int4, 32 rows": few_rows(32, "int4", 128, pairs=2, parameters={"num_warps": 4}),
    "int4, two blocks ahead": few_rows(16, "int4", 128, parameters={"depth": 2}),
    "int4, gated": few_rows(16, "int4", 128, is_gated=True),
    "int4, zeros": few_rows(16, "int4", 128, has_zeros=True),
    "int4, sm_80": few_rows(16, "int4", 128, arch=80),
    "int4, sm_100": few_rows(16, "int4", 128, arch=100),
    "int8": few_rows(8, "int8", 128),
    "fp8": few_rows(16, "fp8", 128),
    "fp8, 32 rows": few_rows(32, "fp8", 128),
    "mxfp4": few_rows(8, "fp4", 32),
    "nvfp4": few_rows(8, "fp4", 16),
}


def test_what_others_leave_to_this_file_is_compiled_for_every_architecture() -> None:
    assert {given["kernel"] for given in CASES.values()} == ELSEWHERE
    assert {given["arch"] for given in CASES.values()} == {80, 90, 100}


@pytest.mark.parametrize("name", CASES)
def test_elements_lie_where_the_assembly_expects_them(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    """8 rows of 4 lanes with neighbours, warps below each other, and elements in the order of columns."""
    call = CASES[name]["call"]
    tiles = max(1, call["num_rows"] // 8)
    (layout,) = compiled[name]["product_layouts"]
    numbers = dict(re.findall(r"(\w+) = \[([\d, ]+)\]", layout))
    assert numbers == {
        "sizePerThread": f"1, {2 * tiles}", "threadsPerWarp": "8, 4",
        "warpsPerCTA": f"{call['parameters']['num_warps']}, 1", "order": "1, 0",
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_little_spills_and_no_warp_waits_for_another(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    report = compiled[name]
    assert report["stack_bytes"] <= 16
    assert report["has_tensor_core"]
    assert not report["has_async_copy"]
    if CASES[name]["arch"] >= 90:
        assert report["waits"]
        assert report["stores_before_wait"] == 0
        assert report["loads_before_wait"] > 0
