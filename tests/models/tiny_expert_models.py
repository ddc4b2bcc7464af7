"""Tiny models with experts: transformers' configuration class, and options that make every field show."""

from __future__ import annotations

from typing import Any

from transformers import (
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tests.models.tiny_options import FULL, ORIGINAL_LEN, SLIDING, rope

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GLM_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "pad_token_id": 0}

WITH_EXPERTS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen3-moe": (
        Qwen3MoeConfig,
        {
            **_EXPERTS,
            "head_dim": 16,
            "attention_bias": True,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
            "mlp_only_layers": [3],
        },
    ),
    "qwen3-moe-window": (
        Qwen3MoeConfig,
        {**_EXPERTS, "num_experts": 6, "use_sliding_window": True, "sliding_window": 9},
    ),
    "qwen2-moe": (
        Qwen2MoeConfig,
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 3,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2-moe-normed": (
        Qwen2MoeConfig,
        {**_EXPERTS, "shared_expert_intermediate_size": 20, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "olmoe": (OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "olmoe-normed": (
        OlmoeConfig,
        {**_EXPERTS, "norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 4, "pad_token_id": 0},
    ),
    "granitemoe": (
        GraniteMoeConfig,
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "logits_scaling": 1.7,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.4,
        },
    ),
    "granitemoe-tied": (
        GraniteMoeConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 3, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "glm4-moe": (
        Glm4MoeConfig,
        {
            **_GLM_EXPERTS,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "glm4-moe-plain": (
        Glm4MoeConfig,
        {**_GLM_EXPERTS, "head_dim": 12, "norm_topk_prob": False, "n_shared_experts": 2, "first_k_dense_replace": 0},
    ),
    "gpt-oss": (
        GptOssConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "pad_token_id": 0,
            **rope("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL_LEN, truncate=False),
        },
    ),
    "gpt-oss-full": (
        GptOssConfig,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "head_dim": 24,
            "layer_types": [FULL, SLIDING],
            "sliding_window": 30,
            "attention_bias": False,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            **rope("yarn", factor=4.0, original_max_position_embeddings=2 * ORIGINAL_LEN, truncate=False),
        },
    ),
    "gpt-oss-mxfp4": (
        GptOssConfig,
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 16,
            "pad_token_id": 0,
            "rope_parameters": None,
        },
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral-window": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 11}),
}

# Of those whose weights by the usual seed choose between experts that are nearly as good (`test_experts`).
SEEDS = {
    "qwen3-moe-window": 0, "qwen2-moe": 6, "qwen2-moe-normed": 1, "granitemoe": 1, "granitemoe-tied": 0,
    "glm4-moe-plain": 1, "gpt-oss": 0,
}  # fmt: skip
