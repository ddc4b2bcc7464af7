"""The models that whole steps are timed with, as their `config.json`s tell of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roofline import HAS_QK_NORM, MODELS

from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.registry import read_spec
from cb_backend.models.spec import ModelSpec

# Of other sizes, and of families that other switches of the kernels are for, than those of `roofline.MODELS`.
OTHERS: dict[str, dict[str, Any]] = {
    "llama-3.2-3b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "llama-3.1-70b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rope_theta": 500000.0,
    },
    "gemma3-4b": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131072, "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi-4": {
        "model_type": "phi3", "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10,
        "max_position_embeddings": 16384, "rope_theta": 250000.0,
    },
    "olmo3-7b": {
        "model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 65536, "sliding_window": 4096,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}  # fmt: skip


def config_values(name: str) -> dict[str, Any]:
    """What the model's `config.json` holds. Raises `KeyError` for a name that is not known."""
    if name in OTHERS:
        return {**OTHERS[name], "dtype": "bfloat16"}
    shape = MODELS[name]
    return {
        "model_type": "qwen3" if name in HAS_QK_NORM else "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 16384,
        "rope_theta": 500000.0,
        "tie_word_embeddings": name != "llama-3.1-8b",
        "dtype": "bfloat16",
    }


def spec_of(name: str) -> ModelSpec:
    return read_spec(ConfigReader(config_values(name), name))
