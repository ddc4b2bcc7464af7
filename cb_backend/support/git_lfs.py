"""Git LFS pointers: what a clone without Git LFS leaves in the place of large files."""

from __future__ import annotations

from pathlib import Path

from cb_backend.contracts.errors import ConfigError

_FIRST_BYTES = b"version https://git-lfs.github.com/spec/"


def refuse_lfs_pointer(path: Path) -> None:
    """Raise `ConfigError` with the remedy if the file at `path` is a pointer; `OSError` if it cannot be read."""
    with path.open("rb") as file:
        if file.read(len(_FIRST_BYTES)) != _FIRST_BYTES:
            return
    raise ConfigError(
        f"{path.name} is a Git LFS pointer, not the file itself; install git-lfs and run 'git lfs pull' in "
        f"{path.parent}"
    )
