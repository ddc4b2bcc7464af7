"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections, maybe one window, parts of heads turned, long ropes."""

from __future__ import annotations

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.layer_spec import FULL_ATTENTION
from cb_backend.layers.rope_config import RopeConfig
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.rope_reader import read_partial_rotary_factor, rope_of, rope_values
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

_DEFAULT_ORIGINAL_LENGTH = 4096
_OLD_NAMES = ("su", "yarn")  # of longrope


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(max_position_embeddings=4_096)
    partial = read_partial_rotary_factor(reader, 1.0)
    attention = read_attention(reader, partial_rotary_factor=partial, is_qkv_fused=True)
    window = read_window(reader, FULL_ATTENTION)
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=read_norm(reader, default_eps=1e-5),
        ropes=(_read_rope(reader, attention.rotary_dim),),
        layers=read_layers(reader, mlp=read_mlp(reader, is_gate_up_fused=True), windows=(window,) * num_layers(reader)),
    )


def _read_rope(reader: ConfigReader, rotary_dim: int) -> RopeConfig:
    rope = rope_values(reader)
    rope_type = rope.get("rope_type", str, rope.get("type", str, "default"))
    rope_type = "longrope" if rope_type in _OLD_NAMES else rope_type
    if rope_type not in ("default", "longrope"):
        raise ConfigError(f"{reader.where} asks for rope_type {rope_type!r}; phi3 has default and longrope")
    given = ConfigReader({**rope.values, "rope_type": rope_type}, rope.where)
    length = reader.positive("original_max_position_embeddings", _DEFAULT_ORIGINAL_LENGTH)
    whole = ConfigReader({**reader.values, "original_max_position_embeddings": length}, reader.where)
    return rope_of(whole, given, rotary_dim, default_theta=10_000.0)
