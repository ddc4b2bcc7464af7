"""Qwen3 (dense): each head of q and k is normed before RoPE; biases are optional; some layers may slide."""

from __future__ import annotations

from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.model_config import JsonReader, ModelConfig, common_fields, read_windows

MODEL_CLASS = DecoderForCausalLM


def read_config(reader: JsonReader) -> ModelConfig:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    fields = common_fields(reader, default_kv_heads=32, default_head_dim=128)
    has_bias = reader.get("attention_bias", bool, False)
    return ModelConfig(
        **fields,
        windows=read_windows(reader, fields["num_layers"]),
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        has_qk_norm=True,
    )
