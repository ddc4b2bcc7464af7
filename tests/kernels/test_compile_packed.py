"""What the compiler makes of products with packed weights: buffers, waits and loads of their loop, on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.compile_cases import case

pytest.importorskip("triton")


def packed_product(num_rows: int, kind: str, group: int, op: str = "linear_packed", **given: Any) -> dict[str, Any]:
    parameters = {"block_n": 128, "num_warps": 4, "num_stages": 4, "splits": 2, **given.pop("parameters", {})}
    call = {"op": op, "parameters": parameters, "num_rows": num_rows, "kind": kind, "group": group, **given}
    return {**case("linear_packed", "_linear_packed_kernel", 90, call), "has_sass": True}


def eight_warps(num_stages: int) -> dict[str, int]:
    return {"num_warps": 8, "num_stages": num_stages, "splits": 1}


CASES = {
    "int4": packed_product(8, "int4", 128),
    "int4, zeros": packed_product(8, "int4", 128, has_zeros=True),
    "int4, groups of 32": packed_product(8, "int4", 32, parameters={"block_n": 64}),
    "int4, gated": packed_product(8, "int4", 128, "linear_silu_mul_packed"),
    "int4, 64 rows": packed_product(64, "int4", 128, parameters=eight_warps(4)),
    "int4, 128 rows": packed_product(128, "int4", 128, parameters={**eight_warps(3), "block_n": 64}),
    "int8, one group": packed_product(8, "int8", 1024),
    "int8, groups of 32": packed_product(8, "int8", 32, parameters={"block_n": 64}),
    "int8, shifts": packed_product(8, "int8", 32, has_shifts=True, parameters={"block_n": 64}),
    "int4, shifts": packed_product(8, "int4", 32, has_shifts=True, parameters={"block_n": 64}),
    "fp8": packed_product(8, "fp8", 128, parameters={"block_n": 64, "prefetch": 16384}),
    "mxfp4": packed_product(8, "fp4", 32),
    "nvfp4": packed_product(8, "fp4", 16),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_spills(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["stack_bytes"] == 0
    assert compiled[name]["registers"] <= 224


@pytest.mark.parametrize("name", CASES)
def test_weights_alone_are_read_before_the_wait(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    """As `test_compile` asks of every dependent launch."""
    report = compiled[name]
    assert report["waits"]
    assert report["stores_before_wait"] == 0
    assert report["loads_before_wait"] > 0


@pytest.mark.parametrize("name", CASES)
def test_packed_products_are_multi_buffered(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    """Words and rows; all but the words, which leave for registers at once, have a stage each."""
    stages = CASES[name]["call"]["parameters"]["num_stages"]
    assert sorted(set(compiled[name]["num_buffers"])) == [stages - 1, stages]
    assert compiled[name]["has_async_copy"]


@pytest.mark.parametrize("name", CASES)
def test_packed_products_wait_for_many_at_once(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    """One wait for all that share a scale. Products with a register operand easily become one wait each."""
    assert compiled[name]["num_wgmma"] >= 8
    assert compiled[name]["num_wgmma_waits"] == (
        4 if name.endswith(("groups of 32", "shifts")) else 1
    )  # a block, of the loop's code


@pytest.mark.parametrize("name", CASES)
def test_packed_products_carry_no_narrow_loads(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    """A number of 8 or 16 bits that a loop carries is waited for in the round that loads it."""
    assert compiled[name]["narrow_loads"] == 0
