"""A server's backend directory: this package in it, by one file under a name that config.pbtxt files can say.

The server finds a Python-based backend as `<backends>/<name>/model.py`. Ours is a door of one import, so an installed
server needs nothing else, and a model directory needs only config.pbtxt and 1/model.json. Under the name `vllm` the
server runs directories that were made for vllm_backend. Knows folders; it starts nothing and reads no model.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cb_backend.cli.paths import CliError

BACKEND_NAME = "cb_backend"
PEER_NAME = "vllm"

DOOR = '''"""The door between the server and cb_backend, for models whose config.pbtxt names this folder as backend."""

from cb_backend.serving.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
_IMPORT = "from cb_backend.serving.backend import"


def install_backend(backends_dir: Path, name: str) -> Path:
    """Write the door `<backends_dir>/<name>/model.py` and return its path; one that is there already is renewed.

    Raises `CliError` for a name that the server cannot have or that is another backend's, and for a folder that is
    missing or cannot be written.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise CliError(f"{name!r} cannot be a backend's name; use letters, digits, '_', '-' and '.'")
    if not backends_dir.is_dir():
        raise CliError(f"backend directory {backends_dir} does not exist; name the server's with --backends-dir")
    folder = backends_dir / name
    if folder.exists() and not is_our_backend(folder):
        raise CliError(
            f"{folder} is another backend; choose another name with --as, or move that folder away if this package "
            "is to take its place"
        )
    door = folder / "model.py"
    if door.is_file() and door.read_text() == DOOR:
        return door
    try:
        folder.mkdir(exist_ok=True)
        fresh = folder / f".model.py.{os.getpid()}"
        fresh.write_text(DOOR)
        fresh.replace(door)
    except OSError as error:
        raise CliError(
            f"{folder} cannot be written ({error.strerror}); run as its owner, or start the server with a "
            "--backend-directory of your own"
        ) from None
    return door


def is_our_backend(folder: Path) -> bool:
    """Whether a backend's folder holds our door, or nothing yet."""
    door = folder / "model.py"
    if not folder.is_dir():
        return False
    return _IMPORT in door.read_text(errors="replace") if door.is_file() else not any(folder.iterdir())


def our_backends(backends_dir: Path) -> frozenset[str]:
    """The names under which this package is installed there."""
    if not backends_dir.is_dir():
        return frozenset()
    return frozenset(door.parent.name for door in backends_dir.glob("*/model.py") if is_our_backend(door.parent))
