"""Gemma 2: norms around both blocks, weights less one, gelu, scaled embeddings, soft caps; half of the layers slide."""

from __future__ import annotations

from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.layer_spec import AttentionSpec, MLPSpec, NormSpec
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import SANDWICH_NORMS, ModelSpec
from cb_backend.models.spec_fields import (
    FULL,
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
    reader = reader.with_defaults(max_position_embeddings=8_192, num_key_value_heads=4)
    attention = read_gemma_attention(reader, softcap=reader.nullable("attn_logit_softcapping", float, 50.0) or 0.0)
    kinds = read_layer_types(reader) or [FULL if index % 2 else SLIDING for index in range(num_layers(reader))]
    return ModelSpec(
        **read_gemma_fields(reader, default_cap=30.0),
        attention=attention,
        ropes=(read_rope(reader, attention.rotary_dim),),
        layers=read_layers(reader, mlp=read_gemma_mlp(reader), windows=windows_of(kinds, read_window(reader, 4096))),
    )


def read_gemma_fields(reader: ConfigReader, *, default_cap: float | None) -> dict[str, Any]:
    """What all Gemmas read alike. default_cap: of the logits."""
    return {
        **read_basics(reader, is_tied=True),
        "norm": read_gemma_norm(reader),
        "norms": SANDWICH_NORMS,
        "embed_scale": reader.positive("hidden_size") ** 0.5,
        "is_embed_scale_rounded": True,
        "logits_softcap": reader.nullable("final_logit_softcapping", float, default_cap) or 0.0,
    }


def read_gemma_attention(reader: ConfigReader, **options: Any) -> AttentionSpec:
    if reader.get("use_bidirectional_attention", bool, False):
        raise ConfigError(
            f"{reader.where}: use_bidirectional_attention is true; supported are models whose tokens see earlier ones "
            "only"
        )
    has_bias = reader.get("attention_bias", bool, False)
    scale = reader.positive_float("query_pre_attn_scalar", 256.0) ** -0.5
    return read_attention(
        reader,
        default_head_dim=256,
        scale=scale,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        **options,
    )


def read_gemma_norm(reader: ConfigReader) -> NormSpec:
    return read_norm(reader, plus_one=True, rounds_first=False)


def read_gemma_mlp(reader: ConfigReader) -> MLPSpec:
    return read_mlp(reader, key="hidden_activation", default_activation="gelu_pytorch_tanh")
