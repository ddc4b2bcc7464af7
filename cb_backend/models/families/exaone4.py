"""EXAONE 4: what blocks give is normed; where some layers slide, the others are not told positions."""

from __future__ import annotations

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.layer_spec import FULL_ATTENTION
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.rope_reader import read_rope
from cb_backend.models.spec import POST_NORMS, ModelSpec
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
    reader = reader.with_defaults(max_position_embeddings=2_048, num_key_value_heads=32)
    norm = read_norm(reader, default_eps=1e-5)
    attention = read_attention(reader, qk_norm=norm)
    window = read_window(reader, default=4096)
    kinds = read_layer_types(reader) or _kinds(reader, has_window=window != FULL_ATTENTION)
    ropes = [0 if window == FULL_ATTENTION or kind == SLIDING else None for kind in kinds]
    return ModelSpec(
        **read_basics(reader),
        attention=attention,
        norm=norm,
        norms=POST_NORMS,
        ropes=(read_rope(reader, attention.rotary_dim),),
        layers=read_layers(reader, mlp=read_mlp(reader), windows=windows_of(kinds, window), ropes=ropes),
    )


def _kinds(reader: ConfigReader, *, has_window: bool) -> list[str]:
    """Every fourth layer, or what `sliding_window_pattern` says, does not slide."""
    count = num_layers(reader)
    if not has_window:
        return [FULL] * count
    if isinstance(reader.values.get("sliding_window_pattern"), str):
        raise ConfigError(
            f"{reader.where}: sliding_window_pattern is {reader.values['sliding_window_pattern']!r} and there are no "
            "layer_types; name each layer's kind in layer_types"
        )
    period = reader.positive("sliding_window_pattern", 4)
    return [SLIDING if (index + 1) % period else FULL for index in range(count)]
