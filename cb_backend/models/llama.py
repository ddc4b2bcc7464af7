"""Llama (1 to 3.x, and the many models published under its name): biases only where the checkpoint says so."""

from __future__ import annotations

from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.model_config import FULL_ATTENTION, JsonReader, ModelConfig, common_fields

MODEL_CLASS = DecoderForCausalLM


def read_config(reader: JsonReader) -> ModelConfig:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    fields = common_fields(reader, default_kv_heads=None, default_head_dim=None)
    has_bias = reader.get("attention_bias", bool, False)
    return ModelConfig(
        **fields,
        windows=(FULL_ATTENTION,) * fields["num_layers"],
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        has_mlp_bias=reader.get("mlp_bias", bool, False),
    )
