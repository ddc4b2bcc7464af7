"""Cases of kernels with launch parameters, for `compiled.compile_all`: by name, and how to make more of them."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import cb_backend.kernels
from tests.kernels.expert_cases import EXPERT_CASES, packed, packed_tiles
from tests.kernels.lora_cases import LORA_CASES


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


def kernel_names() -> set[str]:
    return {
        name
        for module in pkgutil.iter_modules(cb_backend.kernels.__path__)
        for name, value in vars(importlib.import_module(f"cb_backend.kernels.{module.name}")).items()
        if name.endswith("_kernel") and hasattr(value, "arg_names")
    }
