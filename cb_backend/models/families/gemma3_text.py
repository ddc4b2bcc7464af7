"""Gemma 3 (the model of text): Gemma 2 with norms of q and k in place of soft caps, and a rope a kind of layer."""

from __future__ import annotations

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.families.gemma2 import (
    read_gemma_attention,
    read_gemma_fields,
    read_gemma_mlp,
    read_gemma_norm,
)
from cb_backend.models.rope_reader import read_ropes_by_kind
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import (
    FULL,
    SLIDING,
    num_layers,
    read_layer_types,
    read_layers,
    read_window,
    ropes_of,
    windows_of,
)

_THETAS = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(max_position_embeddings=131_072, num_key_value_heads=4)
    if reader.nullable("attn_logit_softcapping", float):
        raise ConfigError(
            f"{reader.where}: attn_logit_softcapping is {reader.values['attn_logit_softcapping']}; Gemma 3 caps no "
            "scores: set it to null"
        )
    attention = read_gemma_attention(reader, qk_norm=read_gemma_norm(reader))
    period = reader.positive("sliding_window_pattern", 6)
    kinds = read_layer_types(reader) or [
        SLIDING if (index + 1) % period else FULL for index in range(num_layers(reader))
    ]
    ropes, rope_of_layer = ropes_of(kinds, read_ropes_by_kind(reader, attention.rotary_dim, _THETAS))
    return ModelSpec(
        **read_gemma_fields(reader, default_cap=None),
        attention=attention,
        ropes=ropes,
        layers=read_layers(
            reader,
            mlp=read_gemma_mlp(reader),
            windows=windows_of(kinds, read_window(reader, 4096)),
            ropes=rope_of_layer,
        ),
        is_length_stretched=True,
    )
