"""Tiny models in every packed format, each with the same weights written out, and what they answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from tests.models import quantised_writers as writers
from tests.models.paged_model import PagedModel
from tests.models.quantised_checkpoints import Writer, write_pair
from tests.models.tiny_checkpoints import random_tokens

SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "head_dim": 32, "max_position_embeddings": 128,
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": False}


def compressed(weights: dict[str, Any], **given: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **given,
    }  # fmt: skip


def pack_quantized(bits: int, group: int, **given: Any) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    weights = {"type": "int", "num_bits": bits, "symmetric": True, **strategy, **given}
    return compressed(weights, format="pack-quantized")


def of_group(write: Callable[..., writers.Written], group: int, **given: Any) -> Writer:
    return lambda out_size, in_size, seed: write(out_size, in_size, group, seed=seed, **given)


def whole(write: Callable[..., writers.Written], **given: Any) -> Writer:
    return lambda out_size, in_size, seed: write(out_size, in_size, seed=seed, **given)


gptq, pack = writers.write_gptq, writers.write_pack_quantized
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "awq 64": ({**AWQ, "group_size": 64}, of_group(writers.write_awq, 64)),
    "awq 32, bf16 scales": ({**AWQ, "group_size": 32}, of_group(writers.write_awq, 32, dtype=torch.bfloat16)),
    "gptq 64": ({**GPTQ, "group_size": 64}, of_group(gptq, 64)),
    "gptq v2": ({**GPTQ, "group_size": 32, "checkpoint_format": "gptq_v2"}, of_group(gptq, 32, is_v2=True)),
    "gptq symmetric": ({**GPTQ, "group_size": 64, "sym": True}, of_group(gptq, 64, is_symmetric=True)),
    "gptq act-order": ({**GPTQ, "group_size": 32, "desc_act": True}, of_group(gptq, 32, is_act_order=True)),
    "gptq one group": ({**GPTQ, "group_size": -1}, of_group(gptq, -1)),
    "gptq 8 bits": ({**GPTQ, "bits": 8, "group_size": 64}, of_group(gptq, 64, bits=8)),
    "gptq 8 bits, 32": ({**GPTQ, "bits": 8, "group_size": 32}, of_group(gptq, 32, bits=8)),
    "w4a16": (pack_quantized(4, 64), of_group(pack, 64)),
    "w4a16, zeros": (pack_quantized(4, 32, symmetric=False), of_group(pack, 32, has_zeros=True)),
    "w4a16, zeros an int8 each": (
        pack_quantized(4, 32, symmetric=False),
        of_group(pack, 32, has_zeros=True, are_zeros_packed=False),
    ),
    "w4a16, act-order": (pack_quantized(4, 32, actorder="group"), of_group(pack, 32, is_act_order=True)),
    "w4a16, act-order by another name": (
        pack_quantized(4, 32, actorder="dynamic"),
        of_group(pack, 32, is_act_order=True),
    ),
    "w4a16, channel": (pack_quantized(4, -1), of_group(pack, -1)),
    "w8a16, 32": (pack_quantized(8, 32), of_group(pack, 32, bits=8)),
    "w8a16": (pack_quantized(8, 64), of_group(pack, 64, bits=8)),
    "w8a16, channel": (pack_quantized(8, -1), of_group(pack, -1, bits=8)),
    "w8a8": (
        compressed({"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True}, format="int-quantized"),
        whole(writers.write_int_quantized),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        whole(writers.write_fp8_blocks),
    ),
    "fp8 blocks, bf16 scales": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        whole(writers.write_fp8_blocks, dtype=torch.bfloat16),
    ),
    "fp8 blocks of compressed-tensors": (
        compressed(
            {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128], "symmetric": True},
            format="float-quantized",
        ),
        whole(writers.write_fp8_blocks, scale_name="weight_scale", dtype=torch.bfloat16),
    ),
    "nvfp4": (
        compressed(
            {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
            format="nvfp4-pack-quantized",
        ),
        whole(writers.write_nvfp4),
    ),
    "mxfp4": (
        compressed(
            {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
            format="mxfp4-pack-quantized",
        ),
        whole(writers.write_mxfp4_packed),
    ),
    "nvfp4 of ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        whole(writers.write_nvfp4, is_modelopt=True),
    ),
    "nvfp4 of ModelOpt, of weights alone": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "exclude_modules": ["lm_head"]},
        whole(writers.write_nvfp4, is_modelopt=True),
    ),
}  # fmt: skip
ENDS = {"pad_token_id": 0, "eos_token_id": 1}  # some families' own are beyond the small vocabulary
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama, biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama, wide": (
        LlamaConfig,
        {"hidden_size": 256, "intermediate_size": 384, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {}),
    # Fused projections, rows in another order, norms around the products, factors, layers without a rope
    "phi3": (Phi3Config, {**ENDS, "bos_token_id": 2}),
    "glm4": (Glm4Config, {"partial_rotary_factor": 0.5, "attention_bias": True, **ENDS}),
    "gemma2": (Gemma2Config, {"sliding_window": 8}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 8, "query_pre_attn_scalar": 32}),
    "olmo2": (Olmo2Config, ENDS),
    "olmo3": (Olmo3Config, {"sliding_window": 8, **ENDS}),
    "granite": (
        GraniteConfig,
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1},
    ),
    "smollm3": (SmolLM3Config, {**ENDS, "bos_token_id": 2}),
    "exaone4": (Exaone4Config, {"sliding_window": 8, "sliding_window_pattern": 2}),
    "ministral3": (Ministral3Config, {}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True},
    ),
    "qwen3-moe, 8 experts": (
        Qwen3MoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 3, "num_experts_per_tok": 2}),
}


def pair(
    folder: Path, family: str, config: dict[str, Any], writer: Writer, *, vocab_size: int = 97, **kept: Any
) -> tuple[Path, Path]:
    """(the folder with plain weights, that with quantised ones); `kept` as in `write_pair`."""
    plain, quantised = folder / "plain", folder / "quantised"
    quantised.mkdir()
    config_class, options = FAMILIES[family]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **options, "vocab_size": vocab_size}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(plain)
    write_pair(plain, quantised, config, writer, **kept)
    return plain, quantised


@torch.inference_mode()
def logits(folder: Path, **options: Any) -> torch.Tensor:
    """Of a prompt in chunks beside another one, then of single tokens of both; options: of the model."""
    model = PagedModel(folder, **options)
    prompts = [random_tokens(21, 1), random_tokens(9, 2)]
    found = [model.step([], [(0, prompts[0][:8]), (1, prompts[1])]), model.step([], [(0, prompts[0][8:])])]
    found += [model.step([(0, token), (1, token + 1)], []) for token in (5, 60, 17)]
    return torch.cat(found)
