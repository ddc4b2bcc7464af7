"""What the compiler makes of the kernels for GPUs that are not here: no spills, tensor cores, real multi-buffering.

Launches are recorded and compiled by `compiling.py`, in a process without the interpreter. Here for Hopper; for all
architectures in `test_compile_archs.py`, with the launch parameters of a GPU's own file in `test_compile_tuned.py`.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import cb_backend.kernels
from tests.kernels.compiled import compile_all
from tests.kernels.expert_cases import EXPERT_CASES, packed, packed_tiles
from tests.kernels.lora_cases import LORA_CASES

pytest.importorskip("triton")


def attention(head_dim: int, **given: Any) -> dict[str, Any]:
    return {"num_heads": 32, "num_kv_heads": 8, "head_dim": head_dim, "block_size": 16, "dtype": "bfloat16", **given}


def case(op: str, kernel: str, arch: int, call: dict[str, Any], **given: Any) -> dict[str, Any]:
    return {"op": op, "kernel": kernel, "arch": arch, "call": call, **given}


def decode(arch: int, head_dim: int, num_stages: int | None = None, **given: Any) -> dict[str, Any]:
    options = {} if num_stages is None else {"num_stages": num_stages}
    call = attention(head_dim, **given)
    return case("decode_attention", "_decode_attention_kernel", arch, call, options=options)


def prefill(arch: int, head_dim: int, **given: Any) -> dict[str, Any]:
    return case("prefill_attention", "_prefill_attention_kernel", arch, attention(head_dim, **given))


def product(op: str, kernel: str, num_rows: int, **parameters: int) -> dict[str, Any]:
    """gate_up or down of an 8192-wide MLP."""
    parameters = {"num_warps": 4, **parameters}
    call = {"op": op, "parameters": parameters, "num_rows": num_rows, "out_size": 8192, "in_size": 2048}
    return case("add_norm_linear" if "norm" in parameters else "linear", kernel, 90, call)


def tiled(num_rows: int, op: str = "linear", **parameters: int) -> dict[str, Any]:
    return product(op, "_linear_kernel", num_rows, **{"block_n": 64, "splits": 2, "block_k": 64, **parameters})


def fp8_product(num_rows: int, op: str = "linear_fp8", arch: int = 90, **parameters: int) -> dict[str, Any]:
    parameters = {"num_warps": 4, "block_n": 64, "splits": 2, "block_k": 256, **parameters}
    call = {"op": op, "parameters": parameters, "num_rows": num_rows, "out_size": 4096, "in_size": 4096}
    return case("linear_fp8", "_linear_kernel", arch, call)


CASES = {
    "decode, 2 stages": decode(90, 128, 2),
    "decode, 3 stages": decode(90, 128, 3),
    "decode, 4 stages": decode(90, 128, 4),
    "decode, sm_80": decode(80, 64),
    "decode, sm_100": decode(100, 128, block_size=64),
    "prefill": prefill(90, 128),
    "prefill, sm_80": prefill(80, 64),
    "prefill, sm_100": prefill(100, 64),
    "plan": case("decode_attention", "_plan_kernel", 90, attention(128)),
    "qkv_post": case("qkv_post", "_qkv_post_kernel", 90,
                     {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "has_norm": True}),
    "qkv_post, many tokens": case("qkv_post", "_qkv_post_kernel", 90,
                     {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "has_norm": False, "num_tokens": 129}),
    "qkv_post, many tokens, norm": case("qkv_post", "_qkv_post_kernel", 90,
                     {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "has_norm": True, "num_tokens": 129}),
    "decode, fp8 cache, 3 stages": decode(90, 128, 3, kv_dtype="float8_e4m3fn"),
    "decode, fp8 cache, 4 stages": decode(90, 128, 4, kv_dtype="float8_e4m3fn"),
    "decode, fp8 cache, head_dim 64": decode(90, 64, kv_dtype="float8_e4m3fn"),
    "decode, fp8 cache, head_dim 256": decode(90, 256, kv_dtype="float8_e4m3fn"),
    "prefill, fp8 cache": prefill(90, 128, kv_dtype="float8_e4m3fn"),
    "qkv_post, fp8 cache": case("qkv_post", "_qkv_post_kernel", 90, {"num_heads": 32, "num_kv_heads": 8,
                                "head_dim": 64, "has_norm": False, "kv_dtype": "float8_e4m3fn"}),
    "rms_norm": case("rms_norm", "_rms_norm_kernel", 90, {"hidden_size": 4096}),
    "reduce_norm": case("reduce_norm", "_reduce_norm_kernel", 90, {"hidden_size": 8192, "num_ranks": 8}),
    "rms_norm, of what is added too": case("rms_norm", "_rms_norm_kernel", 90, {"hidden_size": 5376, "has_post": True,
                                           "weight_dtype": "float32", "rounds_first": False}),
    "rms_norm, scaled": case("rms_norm", "_rms_norm_kernel", 90, {"hidden_size": 4096, "x_scale": 0.22}),
    "gelu_mul": case("silu_mul", "_silu_mul_kernel", 90, {"intermediate_size": 8192, "op": "gelu_mul"}),
    "cap_logits": case("cap_logits", "_cap_logits_kernel", 90, {"vocab_size": 256000}),
    "decode, head_dim 256": decode(90, 256),
    "decode, head_dim 256, softcap": decode(90, 256, softcap=50.0, window=4096),
    "prefill, head_dim 256": prefill(90, 256),
    "prefill, head_dim 256, softcap": prefill(90, 256, softcap=50.0, window=4096),
    "qkv_post, head_dim 256": case("qkv_post", "_qkv_post_kernel", 90, {"num_heads": 8, "num_kv_heads": 4,
                                   "head_dim": 256, "has_norm": True, "norm_dtype": "float32", "rounds_first": False}),
    "qkv_post, head_dim 256, many tokens": case("qkv_post", "_qkv_post_kernel", 90, {"num_heads": 8, "num_kv_heads": 4,
                                   "head_dim": 256, "has_norm": True, "norm_dtype": "float32", "rounds_first": False,
                                   "num_tokens": 129}),
    "qkv_post, query scale": case("qkv_post", "_qkv_post_kernel", 90, {"num_heads": 32, "num_kv_heads": 8,
                                  "head_dim": 128, "has_norm": False, "has_q_scale": True}),
    "silu_mul": case("silu_mul", "_silu_mul_kernel", 90, {"intermediate_size": 8192}),
    "sample, tiles": case("sample", "_bound_kernel", 90, {"vocab_size": 151936}),
    "sample, choice": case("sample", "_choose_kernel", 90, {"vocab_size": 151936}),
    "top_logprobs, tiles": case("top_logprobs", "_tile_logprobs_kernel", 90, {"vocab_size": 151936}),
    "top_logprobs, rows": case("top_logprobs", "_merge_logprobs_kernel", 90, {"vocab_size": 151936}),
    "apply_token_bitmask": case("apply_token_bitmask", "_apply_token_bitmask_kernel", 90, {"vocab_size": 151936}),
    "apply_marks": case("apply_marks", "_apply_marks_kernel", 90, {"vocab_size": 151936}),
    "join_slots": case("join_slots", "_join_slots_kernel", 90, {}),
    "apply_deltas": case("apply_deltas", "_apply_deltas_kernel", 90, {"max_blocks": 256}),
    "prepare_rows": case("prepare_rows", "_prepare_rows_kernel", 90, {"max_blocks": 256, "block_size": 16}),
    "commit_tokens": case("commit_tokens", "_commit_tokens_kernel", 90, {}),
    "mask_stop_ids": case("mask_stop_ids", "_mask_stop_ids_kernel", 90, {"vocab_size": 151936}),
    "linear, 3 stages": tiled(8, block_k=128, num_stages=3),
    "linear, 4 stages": tiled(8, block_k=128, num_stages=4),
    "linear, 64 rows": tiled(64, num_stages=4),
    "linear, 128 rows": tiled(128, block_n=128, num_warps=8, num_stages=4, prefetch=256),
    "linear_silu_mul": tiled(16, "linear_silu_mul", num_stages=5),
    "linear_silu_mul, 128 rows": tiled(128, "linear_silu_mul", num_warps=8, num_stages=4),
    "linear_fp8, 3 stages": fp8_product(8, num_stages=3),
    "linear_fp8, 4 stages": fp8_product(8, num_stages=4),
    "linear_fp8, 128 rows": fp8_product(128, block_n=128, block_k=128, num_warps=8, num_stages=4),
    "linear_fp8, gated": fp8_product(16, "linear_silu_mul_fp8", num_stages=3),
    "linear_fp8, sm_100": fp8_product(16, arch=100, num_stages=3),
    "rms_norm, fp8": case("rms_norm", "_rms_norm_kernel", 90, {"hidden_size": 4096, "op": "add_rms_norm_fp8"}),
    "quantize_rows": case("quantize_rows", "_quantize_kernel", 90, {"size": 14336}),
    "linear_packed": case("linear_packed", "_linear_packed_kernel", 90, {"op": "linear_packed", "num_rows": 8,
                          "kind": "int4", "group": 128, "parameters": {"block_n": 128, "num_warps": 4, "num_stages": 4,
                          "splits": 2}}),
    "dequantise_packed": case("dequantise_packed", "_dequantise_packed_kernel", 90, {"kind": "int4", "group": 128}),
    "dequantise_packed, fp4": case("dequantise_packed", "_dequantise_packed_kernel", 90, {"kind": "fp4", "group": 32}),
    "one row": product("linear", "_one_row_kernel", 1, vector=1, block_n=8, block_k=512),
    "one row, gated": product("linear_silu_mul", "_one_row_kernel", 1, vector=1, block_n=4, block_k=1024, prefetch=256),
    "one row, folded": product("linear", "_one_row_kernel", 1, vector=1, block_n=8, block_k=512, fold=8),
    "one row, gated, folded": product("linear_silu_mul", "_one_row_kernel", 1, vector=1, block_n=4, block_k=1024,
                                      prefetch=256, fold=8),
    "one row, norm": product("add_norm_linear", "_one_row_kernel", 1, vector=1, norm=1, block_n=8, block_k=512, fold=8),
    "one row, norm, prefetching": product("add_norm_linear", "_one_row_kernel", 1, vector=1, norm=1, block_n=4,
                                      block_k=1024, prefetch=256, fold=8),
    "one row, one tile": product("linear_silu_mul", "_one_row_kernel", 1, vector=1, block_n=2, block_k=2048,
                                 prefetch=256),
    **EXPERT_CASES,
    **LORA_CASES,
}  # fmt: skip

# Exact arithmetic for comparisons, in which registers are spilled; it has to run, on any GPU.
FLOAT32 = {
    "decode, float32": decode(90, 128, dtype="float32"),
    "prefill, float32": prefill(90, 128, dtype="float32"),
    "packed_gate_up, float32": packed("grouped_gate_up", 16, packed_tiles(64, 4, 2), "int4", 128, dtype="float32"),
    "packed_down, float32": packed("grouped_down", 16, packed_tiles(64, 4, 2), "fp4", 32, dtype="float32"),
}


ELSEWHERE = {"_packed_few_rows_kernel"}  # for every architecture: test_compile_few_rows.py


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    return compile_all({**CASES, **FLOAT32})


def kernel_names() -> set[str]:
    return {
        name
        for module in pkgutil.iter_modules(cb_backend.kernels.__path__)
        for name, value in vars(importlib.import_module(f"cb_backend.kernels.{module.name}")).items()
        if name.endswith("_kernel") and hasattr(value, "arg_names")
    }


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
