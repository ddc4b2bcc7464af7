"""The model of text inside a checkpoint of several parts (pictures and text): its configuration, its tensors' names."""

from __future__ import annotations

from dataclasses import replace

from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.quantization import KEYS
from cb_backend.models.spec import ModelSpec, Names
from cb_backend.models.stored_dtype import DTYPE_KEYS

# Said of the whole checkpoint, and true of its model of text.
_SHARED = (*DTYPE_KEYS, "eos_token_id", *KEYS)
_NAMES = (
    Names(),
    Names("language_model.model.", "language_model.lm_head.weight"),
    Names("model.language_model."),
    Names("model.language_model.model.", "model.language_model.lm_head.weight"),
)
_OTHER_PARTS = r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\."


def text_reader(reader: ConfigReader) -> ConfigReader:
    """Access to `text_config`, with what is said outside of it."""
    text = reader.section("text_config")
    shared = {key: reader.values[key] for key in _SHARED if reader.values.get(key) is not None}
    own = {key: value for key, value in text.values.items() if not (value is None and key in DTYPE_KEYS)}
    return ConfigReader(own, text.where).with_defaults(**shared)


def as_text_part(spec: ModelSpec, reader: ConfigReader) -> ModelSpec:
    """The specification of a model of text, as part of the checkpoint that `reader` tells of."""
    return replace(
        spec,
        model_type=reader.get("model_type", str),
        tie_word_embeddings=reader.get("tie_word_embeddings", bool, True),  # the whole's counts, not the text's
        names=_NAMES[0],
        other_names=_NAMES[1:],
        ignored=_OTHER_PARTS,
    )
