"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; some layers may slide."""

from __future__ import annotations

from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import (
    read_attention,
    read_basics,
    read_layers,
    read_mlp,
    read_norm,
    read_qwen_windows,
)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(max_position_embeddings=32_768, num_key_value_heads=32)
    attention = read_attention(reader, has_qkv_bias=True)
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=read_norm(reader),
        ropes=(read_rope(reader, attention.rotary_dim),),
        layers=read_layers(reader, mlp=read_mlp(reader), windows=read_qwen_windows(reader)),
    )
