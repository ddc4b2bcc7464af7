"""Mistral: Llama without biases, and with one attention window for all layers unless it is switched off."""

from __future__ import annotations

from cb_backend.errors import ConfigError
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import (
    num_layers,
    read_attention,
    read_basics,
    read_layers,
    read_mlp,
    read_norm,
    read_window,
)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    if len(set(reader.get("layer_types", list, []))) > 1:
        raise ConfigError(f"{reader.where}: mistral with different layer_types is not supported")
    attention = read_attention(reader, default_kv_heads=8)
    window = read_window(reader, default=4096)
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=read_norm(reader),
        ropes=(read_rope(reader, attention.head_dim),),
        layers=read_layers(reader, mlp=read_mlp(reader), windows=(window,) * num_layers(reader)),
    )
