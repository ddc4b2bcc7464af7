"""A GGUF file as a checkpoint folder: config, safetensors, tokenizer. Written once, then checked against the file.

Nothing is taken on trust: the metadata says which tensors there must be, the file has exactly these, and what was
written is read back the way the model will be loaded and compared with what the file says.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.gguf.cache_key import VERSION
from cb_backend.models.gguf.model_settings import read_generation_settings, read_model_settings, read_vocab_size
from cb_backend.models.gguf.rope_scaling import ROPE_FACTORS
from cb_backend.models.gguf.source import GgufSource, open_source
from cb_backend.models.gguf.tensors import Place, check_tensors, kept_kinds, places_of, write_tensors, written_shapes
from cb_backend.models.gguf.tokenizer import write_tokenizer
from cb_backend.models.gguf.vocabulary import Vocabulary, read_vocabulary
from cb_backend.models.registry import read_model_config, read_spec
from cb_backend.models.spec import ModelSpec
from cb_backend.models.weights import open_checkpoint
from cb_backend.support.tokenizer_files import CONVERSION_NOTE

logger = logging.getLogger("cb_backend.models")


def convert(path: Path, folder: Path, *, is_packed: bool = True) -> None:
    """Fill the empty `folder`. A tokenizer that cannot be rebuilt is left out and the reason noted, because another
    one may be named. is_packed: matrices keep the file's bits where these can be served; what of them is written out
    is told in the log. Raises `ConfigError` for whatever else is not supported or damaged.
    """
    source = open_source(path)
    vocabulary = read_vocabulary(source, read_vocab_size(source))
    settings = read_model_settings(source, vocabulary)
    config = read_spec(ConfigReader(settings, source.name))
    places = places_of(config, has_interleaved_rope=source.architecture == "llama")
    check_tensors(source, places)
    kept = kept_kinds(source, places) if is_packed else {}
    write_tensors(source, places, folder, kept)
    if kept:
        settings["quantization_config"] = quantization = quantization_of(source, places, kept)
        logger.info("%s: %s", source.name, _in_words(kept, quantization["written_out"]))
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
    _check(source, vocabulary, config, written_shapes(places, kept), folder)


def quantization_of(source: GgufSource, places: dict[str, Place], kept: dict[str, str]) -> dict[str, Any]:
    """What `models.quantization` reads again: the kind of every module, and what was written out instead."""
    written = {place.module: source.tensors[name].kind for name, place in places.items() if place.is_matrix}
    others = {module: kind for module, kind in written.items() if module not in kept}
    return {"quant_method": "gguf", "modules": kept, "written_out": others}


def _in_words(kept: Mapping[str, str], others: Mapping[str, str]) -> str:
    def counted(kinds: Mapping[str, str]) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in Counter(kinds.values()).most_common())

    written = f"; written out in the model's dtype: {counted(others)}" if others else ""
    return f"matrices that keep the file's bits: {counted(kept)}{written}"


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")


def _check(
    source: GgufSource, vocabulary: Vocabulary, config: ModelSpec, shapes: dict[str, tuple[int, ...]], folder: Path
) -> None:
    """Read the folder back as the model is loaded. A difference is a fault of ours or of a library, not of the file."""
    read = read_model_config(folder)
    written = open_checkpoint(folder, is_packed=read.formats is not None)
    read = replace(read, quantization=None, formats=None)
    factors = source.tensors.get(ROPE_FACTORS)
    for what, expected, found in (
        ("its settings", config, read),
        ("its tensors", shapes, {name: stored.shape for name, stored in written.tensors.items()}),
        ("its ends of an answer", vocabulary.end_ids, read.eos_token_ids),
        ("its rotary factors", () if factors is None else tuple(factors.packed.tolist()), read.ropes[0].long_factor),
    ):
        if expected != found:
            raise ConfigError(
                f"{source.name}: the conversion lost {what} (expected {str(expected)[:200]}, wrote "
                f"{str(found)[:200]}); please report this with the file's name"
            )
