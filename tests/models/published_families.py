"""What the `config.json`s of much-used checkpoints say beside their sizes, as their makers spell it.

Sizes are small ones; every other key is there as published, and what a maker leaves to transformers' defaults is left.
"""

from __future__ import annotations

from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.25,
}  # fmt: skip
_LENGTHS = {"max_position_embeddings": 128}
_SIGLIP = {
    "hidden_size": 16, "image_size": 28, "intermediate_size": 16, "model_type": "siglip_vision_model",
    "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
_PIXTRAL = {
    "attention_dropout": 0.0, "head_dim": 8, "hidden_act": "silu", "hidden_size": 16, "image_size": 28,
    "intermediate_size": 16, "model_type": "pixtral", "num_attention_heads": 2, "num_channels": 3,
    "num_hidden_layers": 1, "patch_size": 14, "rope_theta": 10000.0,
}  # fmt: skip
_SHORT, _LONG = [1.0, 1.02, 1.03, 1.05, 1.1, 1.2], [1.0, 1.1, 1.5, 2.5, 4.0, 8.0]
_MINISTRAL_ROPE = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16, "rope_theta": 1000000.0, "rope_type": "yarn",
    "type": "yarn",
}  # fmt: skip


def _text(**given: Any) -> dict[str, Any]:
    """A `text_config`, which leaves out what the defaults say."""
    kept = {key: value for key, value in _SMALL.items() if not key.endswith("token_id")}
    return {**kept, **given}


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma-2": {
        **_SMALL, **_LENGTHS, "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
        "head_dim": 24, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "model_type": "gemma2", "query_pre_attn_scalar": 24, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "sliding_window": 16, "sliding_window_size": 16, "torch_dtype": "float32", "use_cache": True,
    },
    "gemma-3, the model of text": {
        **_SMALL, **_LENGTHS, "num_hidden_layers": 7, "architectures": ["Gemma3ForCausalLM"], "attention_bias": False,
        "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None,
        "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 16, "sliding_window_pattern": 6, "torch_dtype": "float32",
    },
    "gemma-3, with pictures": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 91, "eoi_token_index": 92,
        "eos_token_id": [1, 95], "image_token_index": 90, "initializer_range": 0.02, "mm_tokens_per_image": 4,
        "model_type": "gemma3", "torch_dtype": "float32", "vision_config": _SIGLIP,
        "text_config": _text(
            model_type="gemma3_text", num_hidden_layers=7, head_dim=16, sliding_window=16,
            rope_scaling={"factor": 8.0, "rope_type": "linear"},
        ),
    },
    "Phi-3, short": {
        **_SMALL, **_LENGTHS, "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "embd_pdrop": 0.0,
        "hidden_act": "silu", "model_type": "phi3", "num_key_value_heads": 4, "original_max_position_embeddings": 128,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 47,
        "tie_word_embeddings": False, "torch_dtype": "float32",
    },
    "Phi-3.5": {
        **_SMALL, **_LENGTHS, "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu", "model_type": "phi3",
        "original_max_position_embeddings": 16, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144,
        "rope_scaling": {"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"},
        "tie_word_embeddings": False, "torch_dtype": "float32",
    },
    "Phi-4": {
        **_SMALL, **_LENGTHS, "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "model_type": "phi3", "original_max_position_embeddings": 128, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "float32",
    },
    "Phi-4-mini": {
        **_SMALL, **_LENGTHS, "hidden_size": 64, "architectures": ["Phi3ForCausalLM"], "full_attn_mod": 1,
        "hidden_act": "silu", "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "model_type": "phi3",
        "original_max_position_embeddings": 16, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"}, "rope_theta": 10000.0,
        "sliding_window": 262144, "tie_word_embeddings": True, "torch_dtype": "float32",
    },
    "Mistral-Nemo": {
        **_SMALL, **_LENGTHS, "architectures": ["MistralForCausalLM"], "head_dim": 16, "hidden_act": "silu",
        "model_type": "mistral", "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "float32",
    },
    "Ministral-8B of 2024": {
        **_SMALL, **_LENGTHS, "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "head_dim": 16,
        "hidden_act": "silu", "model_type": "mistral", "rms_norm_eps": 1e-05, "rope_theta": 100000000.0,
        "sliding_window": 32, "tie_word_embeddings": False, "torch_dtype": "float32",
    },
    "Mistral-Small-3, with pictures": {
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "torch_dtype": "float32", "vision_config": _PIXTRAL, "vision_feature_layer": -1,
        "text_config": _text(
            **_LENGTHS, attention_dropout=0.0, head_dim=16, hidden_act="silu", model_type="mistral", rms_norm_eps=1e-05,
            rope_theta=1000000000.0, sliding_window=None, use_cache=True,
        ),
    },
    "Ministral-3, with pictures": {
        "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "float32", "image_token_index": 10,
        "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
        "spatial_merge_size": 2, "vision_config": _PIXTRAL, "vision_feature_layer": -1,
        "text_config": _text(
            max_position_embeddings=256, attention_dropout=0.0, head_dim=16, hidden_act="silu",
            model_type="ministral3", rms_norm_eps=1e-05, rope_parameters=_MINISTRAL_ROPE, sliding_window=None,
            tie_word_embeddings=False, use_cache=True,
        ),
    },
    "Devstral-2": {
        **_SMALL, "architectures": ["Ministral3ForCausalLM"], "attention_dropout": 0.0, "dtype": "float32",
        "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 256, "model_type": "ministral3",
        "rms_norm_eps": 1e-05, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
        "rope_parameters": {**_MINISTRAL_ROPE, "beta_fast": 4.0, "llama_4_scaling_beta": 0.0, "mscale_all_dim": 0.0},
    },
    "OLMo-2": {
        **_SMALL, **_LENGTHS, "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "model_type": "olmo2", "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32",
    },
    "Olmo-3": {
        **_SMALL, **_LENGTHS, "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "dtype": "float32",
        "hidden_act": "silu", "model_type": "olmo3", "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 16, "rope_type": "yarn",
        },
        "rope_theta": 500000, "sliding_window": 16, "tie_word_embeddings": False,
    },
    "granite-3": {
        **_SMALL, **_LENGTHS, "architectures": ["GraniteForCausalLM"], "attention_bias": False,
        "attention_multiplier": 0.0625, "embedding_multiplier": 12.0, "hidden_act": "silu", "logits_scaling": 16.0,
        "mlp_bias": False, "model_type": "granite", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True, "torch_dtype": "float32",
    },
    "SmolLM3": {
        **_SMALL, **_LENGTHS, "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "layer_types": ["full_attention"] * 4, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "pretraining_tp": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "torch_dtype": "float32",
        "use_sliding_window": False,
    },
    "GLM-4-0414": {
        **_SMALL, **_LENGTHS, "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": [2, 93, 94], "head_dim": 16, "hidden_act": "silu", "model_type": "glm4",
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
    "GLM-Z1, long by yarn": {
        **_SMALL, **_LENGTHS, "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "head_dim": 16,
        "hidden_act": "silu", "model_type": "glm4", "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"}, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "float32",
    },
    "EXAONE-4.0, small": {
        **_SMALL, **_LENGTHS, "architectures": ["Exaone4ForCausalLM"], "head_dim": 12, "hidden_act": "silu",
        "layer_types": ["full_attention"] * 4, "model_type": "exaone4", "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 16,
            "rope_type": "llama3",
        },
        "rope_theta": 1000000, "sliding_window": None, "sliding_window_pattern": None, "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
    "EXAONE-4.0, large": {
        **_SMALL, **_LENGTHS, "architectures": ["Exaone4ForCausalLM"], "head_dim": 12, "hidden_act": "silu",
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "model_type": "exaone4", "reorder_qk_norm": True, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 16,
            "rope_type": "llama3",
        },
        "rope_theta": 1000000, "sliding_window": 16, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
    "Llama-3.2": {
        **_SMALL, **_LENGTHS, "architectures": ["LlamaForCausalLM"], "attention_bias": False, "eos_token_id": [2, 93],
        "head_dim": 12, "hidden_act": "silu", "mlp_bias": False, "model_type": "llama", "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 16,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "float32",
    },
    "Qwen3": {
        **_SMALL, **_LENGTHS, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 16,
        "hidden_act": "silu", "max_window_layers": 4, "model_type": "qwen3", "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "float32", "use_sliding_window": False,
    },
    "Qwen2.5-1M": {
        **_SMALL, **_LENGTHS, "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "max_window_layers": 28,
        "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings":
                                        262144},
        "model_type": "qwen2", "rms_norm_eps": 1e-05, "rope_theta": 10000000.0, "sliding_window": 32768,
        "tie_word_embeddings": False, "torch_dtype": "float32", "use_sliding_window": False,
    },
    "gpt-oss": {
        **_SMALL, **_LENGTHS, "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 2,
        "head_dim": 16, "hidden_act": "silu", "initial_context_length": 16, "model_type": "gpt_oss",
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_experts_per_tok": 2, "num_local_experts": 4,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "router_aux_loss_coef": 0.9,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 16,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "sliding_window": 16, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        **_SMALL, **_LENGTHS, "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False,
        "decoder_sparse_step": 1, "head_dim": 16, "hidden_act": "silu", "max_window_layers": 4, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 24, "norm_topk_prob": True, "num_experts": 8,
        "num_experts_per_tok": 3, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "float32", "use_sliding_window": False,
    },
    "GLM-4.5-Air": {
        **_SMALL, **_LENGTHS, "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True,
        "eos_token_id": [2, 93, 94], "first_k_dense_replace": 1, "head_dim": 16, "hidden_act": "silu",
        "model_type": "glm4_moe", "moe_intermediate_size": 24, "n_group": 1, "n_routed_experts": 8,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 3, "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "float32",
        "use_qk_norm": False,
    },
}  # fmt: skip
