"""Gemma 3 with vision: its model of text alone is served; pictures are not taken."""

from __future__ import annotations

from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.families import gemma3_text
from cb_backend.models.spec import ModelSpec
from cb_backend.models.text_part import as_text_part, text_reader


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises `ConfigError` for a missing key or an unsupported option."""
    # Nested configurations are written without what is the default.
    text = text_reader(reader).with_defaults(
        model_type="gemma3_text",
        vocab_size=262_208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        max_position_embeddings=131_072,
    )
    return as_text_part(gemma3_text.read_spec(text), reader)
