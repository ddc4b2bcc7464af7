"""Adapters as files: `multi_lora.json`, which names their folders, and what tells one state of a file from another.

It does not look into adapters, and remembers nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.scheduling import MAX_NAME_BYTES
from cb_backend.support.json_files import read_json_object
from cb_backend.support.native_paths import native_path, shown_path

LIST_NAME = "multi_lora.json"  # vllm_backend's name for it
WEIGHTS_NAME, CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"
# A file that has not changed for so long is as somebody wants it. (NOTE: it also bounds how coarse a file system's
# clock may be: two states within one tick have one time.)
SETTLED_S = 1.0
_ODD = 0x9E3779B97F4A7C15  # spreads numbers that are near each other (Knuth, The Art of Computer Programming, 6.4)


class Stamp(NamedTuple):
    """One state of one file: equal stamps of a settled file are equal contents."""

    mtime_ns: int
    size: int
    inode: int  # another one where a file was renamed into the place of this
    ctime_ns: int  # of the last change, whatever mtime says: copies (rsync -a, tar, kubectl cp) bring that along

    @property
    def is_settled(self) -> bool:
        """Whether it has not changed just now. A time in the future is some other machine's clock, and no reason to
        wait for it."""
        now = time.time()
        return not any(0 <= now - at / 1e9 < SETTLED_S for at in (self.mtime_ns, self.ctime_ns))

    def source(self, name: str, path: str, is_settled: bool) -> AdapterSource:
        """An adapter's files in this state. Those that have just changed may change once more without another time:
        once they have settled they are another source, and are read again."""
        file_id = self.inode if is_settled else ~self.inode
        return AdapterSource(name, path, self.mtime_ns, self.size, file_id, self.ctime_ns)

    def is_of(self, source: AdapterSource) -> bool:
        """Whether the source's files were in this state, settled or not."""
        return source in (self.source(source.name, source.path, is_settled) for is_settled in (True, False))


def stamp_of(path: Path) -> Stamp | None:
    """None where there is no such file, or none that can be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return Stamp(status.st_mtime_ns, status.st_size, status.st_ino, changed_ns(status))


def changed_ns(status: os.stat_result) -> int:
    """When the file was last changed, renamed or given another mtime; nobody can set it."""
    return status.st_ctime_ns


def folder_stamp(folder: Path) -> Stamp | None:
    """Of an adapter, whose two files are one thing: the newer times, the sum of the sizes. None if one is missing."""
    weights, config = stamp_of(folder / WEIGHTS_NAME), stamp_of(folder / CONFIG_NAME)
    if weights is None or config is None:
        return None
    return Stamp(
        max(weights.mtime_ns, config.mtime_ns),
        weights.size + config.size,
        # Not their difference alone, by `^`: files that were written one after the other have the same.
        (weights.inode * _ODD + config.inode) & (1 << 62) - 1,
        max(weights.ctime_ns, config.ctime_ns),
    )


def read_adapter_list(path: Path) -> dict[str, Path]:
    """Folders by name, in the file's order; relative ones count from the folder that the list lies in.

    Raises `ConfigError` that names the file, the entry and the remedy.
    """
    if stamp_of(path) is None:
        raise ConfigError(
            f"{path.name} is missing beside model.json, which sets enable_lora; write"
            f' {{"name": "folder of the adapter"}} into {shown_path(path)}, or {{}} for none yet'
        )
    values = read_json_object(path, refuses_twins=True)
    return {_checked_name(path, name): adapter_folder(path, name, folder) for name, folder in values.items()}


def adapter_folder(path: Path, name: str, folder: Any) -> Path:
    """The folder that a file at `path` means. Raises `ConfigError` if it is no text."""
    if not isinstance(folder, str) or not folder or "\0" in folder:
        raise ConfigError(f"{path.name} gives {folder!r:.80} for {name!r}; give the adapter's folder")
    return path.parent / native_path(folder).expanduser()


def _checked_name(path: Path, name: str) -> str:
    if not name or len(name.encode(errors="surrogatepass")) > MAX_NAME_BYTES or not name.isprintable():
        raise ConfigError(
            f"{path.name} names an adapter {name!r:.80}; a name is printable text of 1 to {MAX_NAME_BYTES} bytes"
        )
    return name
