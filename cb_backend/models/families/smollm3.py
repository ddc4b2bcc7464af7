"""SmolLM3: Llama in which some layers are not told positions."""

from __future__ import annotations

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.layer_spec import FULL_ATTENTION
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import ModelSpec
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
    reader = reader.with_defaults(max_position_embeddings=32_768, num_key_value_heads=4)
    has_bias = reader.get("attention_bias", bool, False)
    attention = read_attention(reader, has_qkv_bias=has_bias, has_o_bias=has_bias)
    has_rope = _layers_with_rope(reader)
    is_sliding = reader.get("use_sliding_window", bool, False)
    window = read_window(reader, FULL_ATTENTION) if is_sliding else FULL_ATTENTION
    kinds = read_layer_types(reader) or [FULL if rope else SLIDING for rope in has_rope]
    return ModelSpec(
        **read_basics(reader, is_tied=True),
        attention=attention,
        norm=read_norm(reader),
        ropes=(read_rope(reader, attention.rotary_dim, default_theta=2_000_000.0),),
        layers=read_layers(
            reader,
            mlp=read_mlp(reader, has_bias=reader.get("mlp_bias", bool, False)),
            windows=windows_of(kinds, window),
            ropes=[0 if rope else None for rope in has_rope],
        ),
    )


def _layers_with_rope(reader: ConfigReader) -> list[bool]:
    """`no_rope_layers`, in which a 1 means that a layer has a rope; or every fourth has none."""
    count, given = num_layers(reader), reader.get("no_rope_layers", list, None)
    if given is None:
        interval = reader.positive("no_rope_layer_interval", 4)
        return [(index + 1) % interval != 0 for index in range(count)]
    if len(given) < count or any(value not in (0, 1) for value in given):
        raise ConfigError(
            f"{reader.where}: no_rope_layers must hold 1 (the layer has a rope) or 0 for each of {count} layers; found "
            f"{len(given)} entries: {given[:8]}"
        )
    return [bool(value) for value in given[:count]]
