"""Granite with experts in every layer, stored as one matrix of all of them."""

from __future__ import annotations

from cb_backend.layers.layer_spec import ExpertNames
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.expert_fields import read_experts
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import read_attention, read_basics, read_layers, read_norm, refuse_window

_NAMES = ExpertNames(
    module="block_sparse_moe", router="router.layer", experts="", gate="input_linear", down="output_linear"
)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(max_position_embeddings=2_048, intermediate_size=11_008)
    refuse_window(reader)
    has_bias = reader.get("attention_bias", bool, False)
    scale = reader.get("attention_multiplier", float, 1.0)
    attention = read_attention(reader, scale=scale, has_qkv_bias=has_bias, has_o_bias=has_bias)
    experts = read_experts(
        reader, default_experts=8, default_top_k=2, scoring="softmax_of_top_k", storage="stacked", names=_NAMES
    )
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=read_norm(reader),
        ropes=(read_rope(reader, attention.rotary_dim),),
        layers=read_layers(reader, mlp=experts),
        embed_scale=reader.get("embedding_multiplier", float, 1.0),
        residual_scale=reader.get("residual_multiplier", float, 1.0),
        logits_divisor=reader.positive_float("logits_scaling", 1.0),
    )
