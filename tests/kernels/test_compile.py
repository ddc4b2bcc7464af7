"""What the compiler makes of the kernels for GPUs that are not here: no spills, tensor cores, real multi-buffering.

Launches are recorded and compiled by `compiling.py`, in a process without the interpreter. Here for Hopper; for all
architectures in `test_compile_archs.py`, with the launch parameters of a GPU's own file in `test_compile_tuned.py`.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import cb_backend.kernels
from tests.kernels.compile_cases import CASES, ELSEWHERE, FLOAT32, kernel_names
from tests.kernels.compiled import compile_all

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    return compile_all({**CASES, **FLOAT32})


def test_every_kernel_is_compiled() -> None:
    assert {given["kernel"] for given in CASES.values()} == kernel_names() - ELSEWHERE


@pytest.mark.parametrize("name", CASES)
def test_nothing_spills(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["stack_bytes"] == 0
    # With tiles of 256 columns a program has a multiprocessor to itself: there all registers are its own.
    assert compiled[name]["registers"] <= (255 if "head_dim 256" in name else 224)


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_fits_the_shared_memory_of_any_gpu(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["shared_bytes"] <= 99 << 10


def test_every_product_says_that_float32_is_not_to_be_rounded() -> None:
    """Unsaid, it is rounded; and a kernel that is launched with 16 bits alone today may not be tomorrow."""
    unsaid = [
        f"{path.name}:{call.lineno}"
        for path in sorted(Path(cb_backend.kernels.__path__[0]).glob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "tl.dot"
        if "input_precision='ieee'" not in map(ast.unparse, call.keywords)
    ]
    assert unsaid == []


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_is_not_rounded_for_tensor_cores(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    """They would take 10 bits of each number's 23."""
    assert not compiled[name]["has_tensor_core"]


def test_decode_attention_is_multi_buffered(compiled: dict[str, dict[str, Any]]) -> None:
    """More stages hold more K and V tiles in flight: a block id loaded in the loop would quietly end that."""
    two, three, four = (compiled[f"decode, {stages} stages"] for stages in (2, 3, 4))
    tiles = 2 * 64 * 128 * 2  # bytes of one K and one V tile
    assert three["shared_bytes"] - two["shared_bytes"] == tiles
    assert four["shared_bytes"] - three["shared_bytes"] == tiles
    assert (three["num_buffers"], four["num_buffers"]) == ([2, 2], [3, 3])
    assert all(report["has_async_copy"] and report["has_tensor_core"] for report in (two, three, four))


def test_decode_attention_of_an_fp8_cache_is_multi_buffered(compiled: dict[str, dict[str, Any]]) -> None:
    """Tiles travel as they lie, and are widened in registers: a stage more is a K and a V tile of bytes more."""
    three, four = (compiled[f"decode, fp8 cache, {stages} stages"] for stages in (3, 4))
    assert four["shared_bytes"] - three["shared_bytes"] == 2 * 64 * 128
    assert (three["num_buffers"], four["num_buffers"]) == ([2, 2], [3, 3])
    assert three["has_async_copy"]


@pytest.mark.parametrize("name", ["prefill", "prefill, fp8 cache"])
def test_prefill_attention_is_multi_buffered(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["num_buffers"]
    assert min(compiled[name]["num_buffers"]) >= 2


@pytest.mark.parametrize("name", ["prefill", "prefill, fp8 cache"])
def test_prefill_attention_uses_warp_group_products_on_hopper(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["has_wgmma"]


def test_products_are_multi_buffered(compiled: dict[str, dict[str, Any]]) -> None:
    """A stage more is a tile more of weights and of rows in flight."""
    three, four = compiled["linear, 3 stages"], compiled["linear, 4 stages"]
    assert four["shared_bytes"] - three["shared_bytes"] == 2 * 128 * (64 + 16)
    assert four["num_buffers"] == [4, 4]
    assert compiled["linear_silu_mul"]["num_buffers"] == [5, 5, 5]
    assert four["has_async_copy"]


def test_products_of_fp8_are_multi_buffered(compiled: dict[str, dict[str, Any]]) -> None:
    three, four = compiled["linear_fp8, 3 stages"], compiled["linear_fp8, 4 stages"]
    assert four["shared_bytes"] - three["shared_bytes"] == 256 * (64 + 16)
    assert (three["num_buffers"], four["num_buffers"]) == ([3, 3], [4, 4])


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(("linear", "grouped")) and "sm_100" not in n])
def test_products_use_warp_group_products_on_hopper(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["has_wgmma"]


@pytest.mark.parametrize(
    ("name", "num_weights"),
    [("one row, gated", 2), ("one row, gated, folded", 2), ("one row, norm, prefetching", 1), ("linear, 128 rows", 1)],
)
def test_products_prefetch_by_threads_that_hold_a_row_each(
    name: str, num_weights: int, compiled: dict[str, dict[str, Any]]
) -> None:
    """The first threads alone ask, so no row of a weight may be with later ones only."""
    layouts = compiled[name]["prefetch_layouts"]
    assert len(layouts) == num_weights
    assert all(layout.startswith("sizePerThread = [1], threadsPerWarp = [32],") for layout in layouts)


def test_one_row_does_not_prefetch_what_its_first_tile_loads(compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled["one row, one tile"]["prefetch_layouts"] == []


def test_folded_sums_of_one_row_take_fewer_registers(compiled: dict[str, dict[str, Any]]) -> None:
    """So that more programs share a multiprocessor."""
    assert compiled["one row, gated, folded"]["registers"] < 0.75 * compiled["one row, gated"]["registers"]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("decode", "prefill"))])
def test_attention_uses_tensor_cores(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["has_tensor_core"]


# Launched the plain way: after a step, or before its first dependent launch.
PLAIN = ("top_logprobs", "apply_marks", "apply_token_bitmask", "join_slots", "apply_deltas", "lora_plan")


@pytest.mark.parametrize(
    "name", [name for name, given in CASES.items() if given["arch"] >= 90 and not name.startswith(PLAIN)]
)
def test_a_dependent_launch_waits_before_it_touches_results(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    """A kernel that did not wait would break the order of all that follow it (`launch.can_overlap`)."""
    report = compiled[name]
    assert report["waits"]
    assert report["stores_before_wait"] == 0
    # weights; the plan, the slots' state, angles, slots
    reads_early = (
        "one row",
        "rms_norm",
        "reduce_norm",
        "decode",
        "qkv_post",
        "linear_packed",
        "commit_tokens",
        "mask_stop_ids",
        "lora",
    )
    assert (report["loads_before_wait"] > 0) == name.startswith((*reads_early, "route"))
