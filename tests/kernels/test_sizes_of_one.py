"""An integer of 1 is a constant for Triton, and has no methods: kernels compile for sizes of 1 all the same."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import cb_backend
from tests.kernels.compile_cases import product
from tests.kernels.compiled import compile_all
from tests.kernels.expert_cases import grouped, packed, packed_tiles, tiles
from tests.kernels.test_compile_packed import packed_product

pytest.importorskip("triton")


def of_one_column(op: str, kernel: str, num_rows: int, **parameters: int) -> dict[str, Any]:
    case = product(op, kernel, num_rows, **parameters)
    return {**case, "call": {**case["call"], "out_size": 1}}


CASES = {
    "a packed product of one block": packed_product(8, "int4", 128, in_size=128, parameters={"splits": 1}),
    "packed experts of one block": packed(
        "grouped_gate_up", 16, packed_tiles(64, 4, 3), "int4", 128, size=64, hidden=128
    ),
    "experts of one column": grouped("grouped_gate_up", 16, tiles(64, 64, 4, 3), size=1, hidden=128),
    "one column": of_one_column("linear", "_linear_kernel", 8, block_n=64, splits=1, block_k=64, num_stages=3),
    "one column of one row": of_one_column("linear", "_one_row_kernel", 1, vector=1, block_n=8, block_k=512),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    return compile_all(CASES)


@pytest.mark.parametrize("name", CASES)
def test_sizes_of_one_compile(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["registers"] > 0


def methods_of_integers(source: str) -> list[str]:
    """`kernel: integer.method` wherever a kernel asks an integer argument, which may be 1, for a method."""
    found = []
    for kernel in ast.walk(ast.parse(source)):
        if not (isinstance(kernel, ast.FunctionDef) and kernel.name.endswith("_kernel") and kernel.decorator_list):
            continue
        kept = ast.unparse(kernel.decorator_list[0])
        integers = {
            each.arg
            for each in kernel.args.args
            if each.annotation is None and not each.arg.endswith("_ptr") and repr(each.arg) not in kept
        }
        asked = [each for each in ast.walk(kernel) if isinstance(each, ast.Attribute)]
        found += [f"{kernel.name}: {ast.unparse(each)}" for each in asked if ast.unparse(each.value) in integers]
    return found


def test_no_kernel_asks_an_integer_for_a_method() -> None:
    paths = sorted((Path(cb_backend.__file__).parent / "kernels").glob("*.py"))
    assert [told for path in paths for told in methods_of_integers(path.read_text())] == []


def test_such_a_kernel_would_be_found() -> None:
    kernel = "@jit('num_rows')\ndef _a_kernel(x_ptr, size, num_rows, N: tl.constexpr):\n    size.to(1) + num_rows.to(1)"
    assert methods_of_integers(kernel) == ["_a_kernel: size.to"]
