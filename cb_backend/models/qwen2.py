"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; some layers may slide."""

from __future__ import annotations

from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.model_config import JsonReader, ModelConfig, common_fields, read_windows

MODEL_CLASS = DecoderForCausalLM


def read_config(reader: JsonReader) -> ModelConfig:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    fields = common_fields(reader, default_kv_heads=32, default_head_dim=None)
    return ModelConfig(**fields, windows=read_windows(reader, fields["num_layers"]), has_qkv_bias=True)
