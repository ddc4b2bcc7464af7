"""Mistral: Llama without biases, and with one attention window for all layers unless it is switched off."""

from __future__ import annotations

from cb_backend.errors import ConfigError
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.model_config import JsonReader, ModelConfig, common_fields, read_window

MODEL_CLASS = DecoderForCausalLM


def read_config(reader: JsonReader) -> ModelConfig:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    fields = common_fields(reader, default_kv_heads=8, default_head_dim=None)
    if len(set(reader.get("layer_types", list, []))) > 1:
        raise ConfigError(f"{reader.where}: mistral with different layer_types is not supported")
    return ModelConfig(**fields, windows=(read_window(reader, default=4096),) * fields["num_layers"])
