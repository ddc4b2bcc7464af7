"""Llama (1 to 3.x, and the many models published under its name): biases only where the checkpoint says so."""

from __future__ import annotations

from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import read_attention, read_basics, read_layers, read_mlp, read_norm, refuse_window


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(max_position_embeddings=2_048)
    refuse_window(reader)
    has_bias = reader.get("attention_bias", bool, False)
    attention = read_attention(reader, has_qkv_bias=has_bias, has_o_bias=has_bias)
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=read_norm(reader),
        ropes=(read_rope(reader, attention.rotary_dim),),
        layers=read_layers(reader, mlp=read_mlp(reader, has_bias=reader.get("mlp_bias", bool, False))),
    )
