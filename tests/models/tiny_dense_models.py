"""Tiny models whose layers are all dense: transformers' configuration class, and options that make every field show."""

from __future__ import annotations

from typing import Any

from transformers import (
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from tests.models.tiny_options import FULL, LONGROPE, ORIGINAL_LEN, ROPES, SLIDING, rope

DENSE: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama-gqa": (LlamaConfig, {}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama-mqa": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-theta": (LlamaConfig, rope("default") | {"rms_norm_eps": 1e-2, "vocab_size": 131}),
    "llama-head-dim-mha": (LlamaConfig, {"hidden_size": 64, "head_dim": 24, "num_key_value_heads": 4}),
    "llama-head-dim-gqa": (LlamaConfig, {"hidden_size": 64, "head_dim": 24, "num_key_value_heads": 2}),
    "llama-head-dim-mqa": (LlamaConfig, {"hidden_size": 64, "head_dim": 24, "num_key_value_heads": 1}),
    **{f"llama-{name}": (LlamaConfig, options) for name, options in ROPES.items()},
    "llama-yarn-options": (
        LlamaConfig,
        rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0, beta_slow=0.5, truncate=False),
    ),
    "mistral-full": (MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralConfig, {"sliding_window": 16}),
    "qwen2-bias": (Qwen2Config, {}),
    "qwen2-mixed": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "num_hidden_layers": 4},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 20, "attention_bias": True}),
    "qwen3-mixed": (
        Qwen3Config,
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
        },
    ),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 1.7,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.4,
        },
    ),
    "granite-tied": (
        GraniteConfig,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "residual_multiplier": 0.22},
    ),
    "smollm3": (SmolLM3Config, {"num_hidden_layers": 5, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3-sliding": (
        SmolLM3Config,
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            **rope("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL_LEN),
        },
    ),
    "phi3": (Phi3Config, {"num_key_value_heads": 4, "pad_token_id": 0}),
    "phi3-window": (Phi3Config, {"sliding_window": 13, "pad_token_id": 0}),
    "phi3-partial": (
        Phi3Config,
        {
            "hidden_size": 80,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "original_max_position_embeddings": ORIGINAL_LEN,
            **rope("longrope", **{**LONGROPE, "partial_rotary_factor": 0.6}),
        },
    ),
    "ministral": (
        MinistralConfig,
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "sliding_window": 9,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
        },
    ),
    "ministral-all": (MinistralConfig, {"sliding_window": 16, "head_dim": 20}),
    "olmo2": (Olmo2Config, {"pad_token_id": 0}),
    "olmo2-mha": (
        Olmo2Config,
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
    "exaone4": (Exaone4Config, {"sliding_window": None, "layer_types": [FULL, FULL]}),
    "exaone4-hybrid": (
        Exaone4Config,
        {"sliding_window": 10, "sliding_window_pattern": 3, "num_hidden_layers": 6, **ROPES["llama3"]},
    ),
    "gemma2": (
        Gemma2Config,
        {
            "num_hidden_layers": 4,
            "head_dim": 20,
            "query_pre_attn_scalar": 9,
            "sliding_window": 10,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "pad_token_id": 0,
        },
    ),
    "gemma2-plain": (
        Gemma2Config,
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "layer_types": [FULL, SLIDING],
            "sliding_window": 7,
            "pad_token_id": 0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "initializer_range": 0.15,
            "num_hidden_layers": 6,
            "head_dim": 16,
            "query_pre_attn_scalar": 12,
            "sliding_window": 9,
            "layer_types": [SLIDING, SLIDING, FULL] * 2,
            "pad_token_id": 0,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "gemma3-capped": (
        Gemma3TextConfig,
        {
            "head_dim": 24,
            "final_logit_softcapping": 3.0,
            "sliding_window": 5,
            "pad_token_id": 0,
        },
    ),
    "glm4": (Glm4Config, {"head_dim": 16, "pad_token_id": 0}),
    "glm4-whole": (
        Glm4Config,
        {
            "head_dim": 12,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            **rope("default", partial_rotary_factor=1.0),
        },
    ),
    "olmo3": (
        Olmo3Config,
        {
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "layer_types": [SLIDING, FULL] * 2,
            "pad_token_id": 0,
            "rope_parameters": {
                FULL: {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": ORIGINAL_LEN,
                    "rope_theta": 10_000.0,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "olmo3-defaults": (Olmo3Config, {"num_hidden_layers": 5, "sliding_window": 12, "pad_token_id": 0}),
    "ministral3": (
        Ministral3Config,
        {
            "head_dim": 16,
            "pad_token_id": 0,
            **rope(
                "yarn",
                factor=8.0,
                original_max_position_embeddings=ORIGINAL_LEN,
                llama_4_scaling_beta=0.3,
                mscale=1.0,
                mscale_all_dim=0.5,
            ),
        },
    ),
    "ministral3-window": (
        Ministral3Config,
        {
            "head_dim": 12,
            "sliding_window": 11,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            **rope("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL_LEN, llama_4_scaling_beta=0.1),
        },
    ),
}
