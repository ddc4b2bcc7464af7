"""Ministral 3: Mistral whose queries are scaled by their position, in steps of the pretraining length."""

from __future__ import annotations

from dataclasses import replace

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.layer_spec import FULL_ATTENTION
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.rope_reader import read_rope, rope_values
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

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(max_position_embeddings=262_144, num_key_value_heads=8)
    if reader.get("rope_parameters", dict, None) is None and reader.get("rope_scaling", dict, None) is None:
        reader = ConfigReader({**reader.values, "rope_parameters": _DEFAULT_ROPE}, reader.where)
    attention = read_attention(reader, default_head_dim=128)
    rope = read_rope(reader, attention.rotary_dim)
    beta = rope_values(reader).get("llama_4_scaling_beta", float, 0.0)
    if beta and rope.original_max_position_embeddings == 0:
        raise ConfigError(
            f"{reader.where}: llama_4_scaling_beta is {beta}, which needs a rope with "
            f"original_max_position_embeddings; rope_type {rope.rope_type!r} has none"
        )
    window = read_window(reader, FULL_ATTENTION)
    kinds = read_layer_types(reader) or [SLIDING] * num_layers(reader)
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=read_norm(reader, default_eps=1e-5),
        ropes=(replace(rope, query_scale_beta=beta),),
        layers=read_layers(reader, mlp=read_mlp(reader), windows=windows_of(kinds, window)),
    )
