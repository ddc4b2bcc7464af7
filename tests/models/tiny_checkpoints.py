"""Tiny random checkpoints, made and computed by transformers: the independent reference of the model tests.

Weights are drawn large enough that attention is sharp and every option shows in the logits; biases and norm weights,
which transformers starts at 0 and 1, are drawn too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from cb_backend.models.registry import family_names

# The others are of pictures and text: `test_text_parts`.
TEXT_FAMILIES = sorted({*family_names()} - {"gemma3", "mistral3"})
ORIGINAL_LEN = 16  # pretraining context of the scaled ropes; max_position_embeddings is 8 times that

_BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8 * ORIGINAL_LEN,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **values}}


_LONGROPE = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
    "original_max_position_embeddings": ORIGINAL_LEN,
}
# Wavelengths below 8 are kept, above 32 stretched; head_dim 12 has some below, between and above.
_LLAMA3 = {"low_freq_factor": 0.5, "high_freq_factor": 2.0, "original_max_position_embeddings": ORIGINAL_LEN}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {**_rope("linear", factor=8.0)},
    # dynamic stretches beyond max_position_embeddings itself
    "dynamic": {**_rope("dynamic", factor=4.0), "max_position_embeddings": ORIGINAL_LEN},
    "llama3": _rope("llama3", factor=8.0, **_LLAMA3),
    "yarn": _rope("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL_LEN),
    "longrope": _rope("longrope", factor=8.0, **_LONGROPE),
}

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GLM_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "pad_token_id": 0}
_FULL, _SLIDING = "full_attention", "sliding_attention"

CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama-gqa": (LlamaConfig, {}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama-mqa": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-theta": (LlamaConfig, _rope("default") | {"rms_norm_eps": 1e-2, "vocab_size": 131}),
    "llama-head-dim-mha": (LlamaConfig, {"hidden_size": 64, "head_dim": 24, "num_key_value_heads": 4}),
    "llama-head-dim-gqa": (LlamaConfig, {"hidden_size": 64, "head_dim": 24, "num_key_value_heads": 2}),
    "llama-head-dim-mqa": (LlamaConfig, {"hidden_size": 64, "head_dim": 24, "num_key_value_heads": 1}),
    **{f"llama-{name}": (LlamaConfig, options) for name, options in ROPES.items()},
    "llama-yarn-options": (
        LlamaConfig,
        _rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0, beta_slow=0.5, truncate=False),
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
            **_rope("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL_LEN),
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
            **_rope("longrope", **{**_LONGROPE, "partial_rotary_factor": 0.6}),
        },
    ),
    "ministral": (
        MinistralConfig,
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "sliding_window": 9,
            "layer_types": [_FULL, _SLIDING, _SLIDING, _FULL],
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
    "exaone4": (Exaone4Config, {"sliding_window": None, "layer_types": [_FULL, _FULL]}),
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
            "layer_types": [_FULL, _SLIDING],
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
            "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
            "pad_token_id": 0,
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
                _SLIDING: {"rope_type": "default", "rope_theta": 700.0},
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
            **_rope("default", partial_rotary_factor=1.0),
        },
    ),
    "olmo3": (
        Olmo3Config,
        {
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "layer_types": [_SLIDING, _FULL] * 2,
            "pad_token_id": 0,
            "rope_parameters": {
                _FULL: {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": ORIGINAL_LEN,
                    "rope_theta": 10_000.0,
                },
                _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
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
            **_rope("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL_LEN, truncate=False),
        },
    ),
    "gpt-oss-full": (
        GptOssConfig,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "head_dim": 24,
            "layer_types": [_FULL, _SLIDING],
            "sliding_window": 30,
            "attention_bias": False,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=2 * ORIGINAL_LEN, truncate=False),
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
    "olmo3-defaults": (Olmo3Config, {"num_hidden_layers": 5, "sliding_window": 12, "pad_token_id": 0}),
    "ministral3": (
        Ministral3Config,
        {
            "head_dim": 16,
            "pad_token_id": 0,
            **_rope(
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
            **_rope("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL_LEN, llama_4_scaling_beta=0.1),
        },
    ),
}


def write_checkpoint(name: str, folder: Path, **save_options: Any) -> Path:
    """Save the checkpoint called `name` in CONFIGS; return the folder."""
    config_class, options = CONFIGS[name]
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(config_class(**{**_BASE, **options}))
    draw_what_starts_alike(model)
    model.save_pretrained(folder, **save_options)
    return folder


@torch.no_grad()
def draw_what_starts_alike(model: torch.nn.Module) -> None:
    """What transformers starts at 0 and 1."""
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("bias", "sinks")):
            parameter.normal_(0.0, 0.3)
        elif "norm" in parameter_name:
            parameter.uniform_(0.5, 1.5)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)


def load_reference(folder: Path, **options: Any) -> torch.nn.Module:
    """The model as transformers loads it, with its plainest attention."""
    given = {"attn_implementation": "eager", "dtype": torch.float32, **options}
    return AutoModelForCausalLM.from_pretrained(folder, **given).eval()


@torch.inference_mode()
def reference_logits(folder: Path, prompt: list[int], decode: list[int]) -> Tensor:
    """The prompt in one pass, then each further token in its own: [len(prompt) + len(decode), vocab].

    The model is loaded anew because the dynamic rope of transformers remembers the longest prompt it has seen.
    """
    model = load_reference(folder)
    output = model(torch.tensor([prompt]), use_cache=True)
    logits = [output.logits[0]]
    for token in decode:
        output = model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits[0])
    return torch.cat(logits)


def random_tokens(count: int, seed: int, vocab_size: int = 97) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()
