"""One model in GGUF: which files it consists of, what else beside them counts, and their content opened.

A large model may be split over several files, whose names say so. Only the first part holds the metadata. This module
knows no architecture, no tokenizer and no torch; tensors stay in the bits of the file until someone dequantises them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cb_backend.contracts.errors import ConfigError

# Beside the file, and read where they are: the original tokenizer, and a chat template that overrides the file's.
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as the file has it."""

    shape: tuple[int, ...]  # rows first, as PyTorch has it
    kind: str  # F32, F16, BF16, Q8_0, Q4_0, ...
    packed: np.ndarray  # mapped from the file: the numbers, or for quantised kinds the bytes of each row


@dataclass(frozen=True, slots=True)
class GgufSource:
    """The metadata and tensors of one model, of all parts together."""

    name: str  # of the file, for messages
    architecture: str
    metadata: dict[str, Any]  # key -> int, float, bool, str, or a list of these
    tensors: dict[str, GgufTensor]
    beside: dict[str, Path]  # files next to it that count: name -> path


def is_gguf_name(name: str) -> bool:
    return name.lower().endswith(".gguf")


def is_gguf(path: Path) -> bool:
    """Whether the file is GGUF by its first bytes, whatever its name (caches name files by their digest). Raises
    `ConfigError` for a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read ({error.strerror}: {path})") from None


def find_models(folder: Path) -> list[Path]:
    """The GGUF models in a folder, each by its first part; encoders for images or sound are none."""
    paths = sorted(path for path in folder.iterdir() if is_gguf_name(path.name) and path.is_file())
    models = {_name_of_part(match, 1) if (match := _PART.fullmatch(path.name)) else path.name: path for path in paths}
    return [path.with_name(name) for name, path in models.items() if not name.lower().startswith("mmproj")]


def find_parts(path: Path) -> list[Path]:
    """All files of the model that `path` is, or is a part of. Raises `ConfigError` that names the missing parts."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    names = [_name_of_part(match, number) for number in range(1, int(match["count"]) + 1)]
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        found = [name for name in names if name not in missing]
        raise ConfigError(
            f"{path.name} is one part of a split GGUF file of {len(names)}; found {listed(found)}, missing "
            f"{listed(missing)}. Put all parts into one folder"
        )
    return [path.with_name(name) for name in names]


def files_beside(path: Path) -> dict[str, Path]:
    """The files next to the GGUF file that count, by name. A tokenizer's settings do only together with it."""
    names = [TOKENIZER, TOKENIZER_CONFIG] if path.with_name(TOKENIZER).is_file() else []
    found = {name: path.with_name(name) for name in (*names, CHAT_TEMPLATE)}
    return {name: file for name, file in found.items() if file.is_file()}


def open_source(path: Path) -> GgufSource:
    """Read the metadata of all parts and map their tensors. Raises `ConfigError` for a damaged file or a lack of
    parts.
    """
    parts = find_parts(path)
    readers = [_read(part) for part in parts]
    metadata = readers[0][0]
    tensors: dict[str, GgufTensor] = {}
    for part, (its_metadata, its_tensors) in zip(parts, readers, strict=True):
        count = its_metadata.get("split.count", 1)
        if count != len(parts):
            raise ConfigError(
                f"{part.name} is part {its_metadata.get('split.no', 0) + 1} of a split GGUF file of {count}, which its "
                f"name does not say; name the parts NAME-00001-of-{count:05}.gguf and so on, in one folder"
            )
        if not its_tensors.keys().isdisjoint(tensors):
            raise ConfigError(f"{part.name} repeats tensors of other parts; fetch all parts of one model again")
        tensors.update(its_tensors)
    promised = metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise ConfigError(f"{path.name} promises {promised} tensors in all parts, found {len(tensors)}; fetch it again")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ConfigError(f"{parts[0].name} does not set 'general.architecture'; the file is incomplete")
    return GgufSource(parts[0].name, architecture, metadata, tensors, files_beside(path))


def listed(names: Iterable[str], most: int = 4) -> str:
    """The first names and how many follow, for messages."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def _name_of_part(match: re.Match[str], number: int) -> str:
    return f"{match['stem']}-{number:05}-of-{match['count']}{match['suffix']}"


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    from gguf import GGUFReader, GGUFValueType

    _check_magic(path)
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        for key, field in reader.fields.items():
            if field.types == [GGUFValueType.FLOAT32]:
                metadata[key] = float(str(np.float32(metadata[key])))  # 1e-05 as it was written, not 9.99999974e-06
    except (ValueError, LookupError, OverflowError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{path.name} cannot be converted: it is cut off or damaged, or newer than the installed package gguf can "
            f"read ({reason}); compare its size with the original's and fetch it again"
        ) from None
    tensors = {
        tensor.name: GgufTensor(tuple(reversed(tensor.shape.tolist())), tensor.tensor_type.name, tensor.data)
        for tensor in reader.tensors
    }
    return metadata, tensors


def _check_magic(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        raise ConfigError(f"{path.name} is a pointer of Git LFS, not the file itself; run git lfs pull in its folder")
    if not start.startswith(_MAGIC):
        raise ConfigError(f"{path.name} is not a GGUF file (it begins with {start[:8]!r}); fetch it again")
