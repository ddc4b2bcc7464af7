"""When a conversion is used again: for the same content of all that was read, made by the same version of the code."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.gguf.source import files_beside, find_parts
from cb_backend.support.tokenizer_files import CONVERSION_NOTE

# Of what a conversion writes. To be raised with every change of it: older conversions are then made again.
VERSION = 2


def conversion_key(path: Path, is_packed: bool) -> str:
    """A digest of all parts, of what counts beside them, of VERSION and of the conversion's form. Raises `ConfigError`
    for a lack of parts or a file that cannot be read.
    """
    digest = hashlib.sha256(b"conversion %d\0" % VERSION + b"packed\0" * is_packed)
    files = {f"part {number}": part for number, part in enumerate(find_parts(path))} | files_beside(path)
    for role, file in files.items():
        try:
            digest.update(f"{role}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(1 << 22):
                    digest.update(chunk)
        except OSError as error:
            raise ConfigError(f"{file.name} cannot be read ({error.strerror}: {file})") from None
    return digest.hexdigest()[:32]


def is_current(folder: Path) -> bool:
    """Whether this version of the conversion has written the folder."""
    try:
        note = json.loads((folder / CONVERSION_NOTE).read_text(encoding="utf-8"))
        return bool(note["version"] == VERSION)
    except (OSError, ValueError, LookupError, TypeError):
        return False
