"""What would come of a GGUF file, without converting it: its metadata and the names and shapes of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.gguf.conversion import quantization_of
from cb_backend.models.gguf.model_settings import read_model_settings, read_vocab_size
from cb_backend.models.gguf.source import GgufSource, open_source
from cb_backend.models.gguf.tensors import check_tensors, kept_kinds, places_of
from cb_backend.models.gguf.vocabulary import Vocabulary, read_vocabulary
from cb_backend.models.registry import read_spec
from cb_backend.models.spec import ModelSpec
from cb_backend.models.weights import Complain


@dataclass(slots=True)
class GgufOutline:
    """What could be read; None: what stands before it could not."""

    source: GgufSource | None = None
    vocabulary: Vocabulary | None = None
    spec: ModelSpec | None = None
    kinds: dict[str, str] = field(default_factory=dict)  # module in the checkpoint -> its weight's type in the file


def outline_gguf(path: Path, complain: Complain) -> GgufOutline:
    """`complain` is told of what the conversion would refuse, as far as it can be seen without the values."""
    found = GgufOutline()
    try:
        source = found.source = open_source(path)
        found.vocabulary = read_vocabulary(source, read_vocab_size(source))
        settings = read_model_settings(source, found.vocabulary)
        spec = found.spec = read_spec(ConfigReader(settings, source.name))
        places = places_of(spec, has_interleaved_rope=source.architecture == "llama")
        found.kinds = {
            place.module: source.tensors[name].kind
            for name, place in places.items()
            if name in source.tensors and place.module != place.name
        }
        check_tensors(source, places)
        if kept := kept_kinds(source, places):
            settings["quantization_config"] = quantization_of(source, places, kept)
            found.spec = read_spec(ConfigReader(settings, source.name))
    except ConfigError as error:
        complain(str(error))
    return found
