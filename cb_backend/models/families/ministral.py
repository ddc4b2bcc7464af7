"""Ministral: Mistral in which each layer is said to slide or not."""

from __future__ import annotations

from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import (
    SLIDING,
    num_layers,
    read_attention,
    read_basics,
    read_layer_types,
    read_layers,
    read_mlp,
    read_norm,
    read_window,
    windows_of,
)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(max_position_embeddings=131_072, num_key_value_heads=8)
    attention = read_attention(reader)
    kinds = read_layer_types(reader) or [SLIDING] * num_layers(reader)
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=read_norm(reader),
        ropes=(read_rope(reader, attention.rotary_dim),),
        layers=read_layers(reader, mlp=read_mlp(reader), windows=windows_of(kinds, read_window(reader, default=4096))),
    )
