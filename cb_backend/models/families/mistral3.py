"""Mistral Small 3 and Ministral 3 with vision: their model of text alone is served; pictures are not taken."""

from __future__ import annotations

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.families import ministral, ministral3
from cb_backend.models.spec import ModelSpec
from cb_backend.models.text_part import as_text_part, text_reader

_READERS = {"mistral": ministral.read_spec, "ministral": ministral.read_spec, "ministral3": ministral3.read_spec}


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    text = text_reader(reader).with_defaults(model_type="mistral")
    kind = text.get("model_type", str)
    if kind not in _READERS:
        raise ConfigError(f"{text.where}: model_type {kind!r} is not supported there; supported: {', '.join(_READERS)}")
    is_third = kind == "ministral3"
    # Nested configurations are written without what is the default.
    text = text.with_defaults(
        vocab_size=131_072 if is_third else 32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=34 if is_third else 32,
        num_attention_heads=32,
        max_position_embeddings=262_144 if is_third else 131_072,
    )
    return as_text_part(_READERS[kind](text), reader)
