"""A GGUF file as a checkpoint folder: config, safetensors, tokenizer. Written once, then checked against the file.

Nothing is taken on trust: the metadata says which tensors there must be, the file has exactly these, and what was
written is read back the way the model will be loaded and compared with what the file says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.gguf.cache_key import VERSION
from cb_backend.models.gguf.model_settings import read_generation_settings, read_model_settings, read_vocab_size
from cb_backend.models.gguf.rope_scaling import ROPE_FACTORS
from cb_backend.models.gguf.source import GgufSource, open_source
from cb_backend.models.gguf.tensors import Place, check_tensors, places_of, write_tensors
from cb_backend.models.gguf.tokenizer import write_tokenizer
from cb_backend.models.gguf.vocabulary import Vocabulary, read_vocabulary
from cb_backend.models.registry import read_model_config, read_spec
from cb_backend.models.spec import ModelSpec
from cb_backend.models.weights import open_checkpoint
from cb_backend.support.tokenizer_files import CONVERSION_NOTE


def convert(path: Path, folder: Path) -> None:
    """Fill the empty `folder`. A tokenizer that cannot be rebuilt is left out and the reason noted, because another
    one may be named. Raises `ConfigError` for whatever else is not supported or damaged.
    """
    source = open_source(path)
    vocabulary = read_vocabulary(source, read_vocab_size(source))
    settings = read_model_settings(source, vocabulary)
    config = read_spec(ConfigReader(settings, source.name))
    places = places_of(config, has_interleaved_rope=source.architecture == "llama")
    check_tensors(source, places)
    write_tensors(source, places, folder)
    _write_json(folder / "config.json", settings)
    _write_json(folder / "generation_config.json", read_generation_settings(source, vocabulary))
    note = {"version": VERSION, "source": source.name}
    try:
        write_tokenizer(source, vocabulary, folder)
    except ConfigError as error:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink(missing_ok=True)
        note["no_tokenizer"] = (
            f"the tokenizer of {source.name} cannot be used: {error}; name the original model's tokenizer in the "
            "engine argument tokenizer, or put its tokenizer.json beside the file"
        )
    _write_json(folder / CONVERSION_NOTE, note)
    _check(source, vocabulary, config, places, folder)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")


def _check(
    source: GgufSource, vocabulary: Vocabulary, config: ModelSpec, places: dict[str, Place], folder: Path
) -> None:
    """Read the folder back as the model is loaded. A difference is a fault of ours or of a library, not of the file."""
    read = read_model_config(folder)
    written = open_checkpoint(folder)
    factors = source.tensors.get(ROPE_FACTORS)
    for what, expected, found in (
        ("its settings", config, read),
        (
            "its tensors",
            {place.name: place.shape for place in places.values()},
            {name: stored.shape for name, stored in written.tensors.items()},
        ),
        ("its ends of an answer", vocabulary.end_ids, read.eos_token_ids),
        ("its rotary factors", () if factors is None else tuple(factors.packed.tolist()), read.ropes[0].long_factor),
    ):
        if expected != found:
            raise ConfigError(
                f"{source.name}: the conversion lost {what} (expected {str(expected)[:200]}, wrote "
                f"{str(found)[:200]}); please report this with the file's name"
            )
