"""OLMo 3: OLMo 2 in which three of four layers slide, and a rope for each kind of layer."""

from __future__ import annotations

from dataclasses import replace

from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.families import olmo2
from cb_backend.models.rope_reader import read_ropes_by_kind
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import (
    FULL,
    SLIDING,
    num_layers,
    read_layer_types,
    read_layers,
    read_mlp,
    read_window,
    ropes_of,
    windows_of,
)

_THETAS = {FULL: ("rope_theta", 500_000.0), SLIDING: ("rope_theta", 500_000.0)}


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    reader = reader.with_defaults(max_position_embeddings=2_048)
    kinds = read_layer_types(reader) or [SLIDING if (index + 1) % 4 else FULL for index in range(num_layers(reader))]
    # OLMo 2 knows neither windows nor ropes by kind.
    of_olmo2 = {**reader.values, "rope_parameters": None, "rope_scaling": None, "sliding_window": None}
    base = olmo2.read_spec(ConfigReader(of_olmo2, reader.where))
    ropes, rope_of_layer = ropes_of(kinds, read_ropes_by_kind(reader, base.attention.rotary_dim, _THETAS))
    windows = windows_of(kinds, read_window(reader, 4096))
    layers = read_layers(reader, mlp=read_mlp(reader), windows=windows, ropes=rope_of_layer)
    return replace(base, ropes=ropes, layers=layers)
