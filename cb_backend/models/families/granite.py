"""Granite (dense): Llama with factors on embeddings, scores, what blocks add, and logits."""

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
    scale = reader.get("attention_multiplier", float, 1.0)
    attention = read_attention(reader, scale=scale, has_qkv_bias=has_bias, has_o_bias=has_bias)
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=read_norm(reader),
        ropes=(read_rope(reader, attention.rotary_dim),),
        layers=read_layers(reader, mlp=read_mlp(reader, has_bias=reader.get("mlp_bias", bool, False))),
        embed_scale=reader.get("embedding_multiplier", float, 1.0),
        residual_scale=reader.get("residual_multiplier", float, 1.0),
        logits_divisor=reader.positive_float("logits_scaling", 1.0),
    )
