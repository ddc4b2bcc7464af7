"""Mixtral: Mistral with experts in every layer; one window for all layers or none."""

from __future__ import annotations

from cb_backend.layers.layer_spec import FULL_ATTENTION, ExpertNames
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.expert_fields import read_experts
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import (
    num_layers,
    read_attention,
    read_basics,
    read_layers,
    read_norm,
    read_window,
)

_NAMES = ExpertNames(module="block_sparse_moe", gate="w1", up="w3", down="w2")


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(max_position_embeddings=131_072, num_key_value_heads=8, intermediate_size=14_336)
    attention = read_attention(reader)
    experts = read_experts(reader, default_experts=8, default_top_k=2, renormalise=True, names=_NAMES)
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=read_norm(reader, default_eps=1e-5),
        ropes=(read_rope(reader, attention.rotary_dim, default_theta=1e6),),
        layers=read_layers(reader, mlp=experts, windows=[read_window(reader, FULL_ATTENTION)] * num_layers(reader)),
    )
