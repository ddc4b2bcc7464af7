"""What is in a safetensors file, and where: its header, read once and checked against the file's size.

A file is eight bytes (the header's length, little endian), the header (JSON), and the tensors one after the other
(https://github.com/huggingface/safetensors#format). This module reads headers alone and needs no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cb_backend.contracts.errors import ConfigError
from cb_backend.support.git_lfs import refuse_lfs_pointer

ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_MOST_HEADER_BYTES = 100_000_000  # as the format has it
_REMEDY = "fetch the checkpoint again"


class FileStamp(NamedTuple):
    """Tells whether a file is still the one that it was."""

    size: int  # bytes
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class StoredTensor(NamedTuple):
    """A tensor of a file, or some of its rows."""

    name: str  # in the file
    path: Path
    stamp: FileStamp  # of the file when its header was read
    dtype: str  # of ITEM_SIZES
    shape: tuple[int, ...]
    offset: int  # of the first byte, from the file's start
    num_bytes: int

    def rows(self, start: int, size: int) -> StoredTensor:
        """The entries `start` to `start + size` of the first dimension."""
        row_bytes = self.num_bytes // self.shape[0] if self.shape[0] else 0
        return self._replace(
            shape=(size, *self.shape[1:]), offset=self.offset + start * row_bytes, num_bytes=size * row_bytes
        )


class _BrokenError(Exception):
    """What is wrong with a file."""


def read_header(path: Path) -> list[StoredTensor]:
    """The file's tensors in the order of their places. Raises `ConfigError` that names the file, the tensor and the
    sizes for one that is cut off, is something else, or contradicts itself.
    """
    try:
        refuse_lfs_pointer(path)
        with path.open("rb") as file:
            stamp = FileStamp.of(os.fstat(file.fileno()))
            length = int.from_bytes(file.read(8), "little")
            if stamp.size < 8 or not 2 <= length <= min(stamp.size - 8, _MOST_HEADER_BYTES):
                raise _BrokenError(f"its {stamp.size} bytes do not begin with a header")
            entries = _parse(file.read(length))
        return list(_places(entries, path, stamp, 8 + length))
    except (_BrokenError, OSError) as error:
        raise ConfigError(f"{path.name} is not a whole safetensors file ({error}); {_REMEDY}") from None


def _parse(header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header)
    except ValueError as error:
        raise _BrokenError(f"its header is no JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _BrokenError("its header is no JSON object")
    entries.pop("__metadata__", None)
    return entries


def _places(entries: dict[str, Any], path: Path, stamp: FileStamp, start: int) -> Iterator[StoredTensor]:
    """Tensors lie one behind the other, from `start` to the file's end."""
    described = sorted(((name, *_described(name, entry)) for name, entry in entries.items()), key=lambda each: each[3])
    end = 0
    for name, dtype, shape, first, last in described:
        if first != end:
            raise _BrokenError(f"tensor {name} begins at byte {first} of the data, the one before it ends at {end}")
        end = last
        if dtype in ITEM_SIZES and last - first != math.prod(shape) * ITEM_SIZES[dtype]:
            raise _BrokenError(f"tensor {name}, {dtype} {list(shape)}, has {last - first} bytes")
        if start + end > stamp.size:
            raise _BrokenError(
                f"tensor {name} would end at byte {start + end}, the file has {stamp.size}: "
                f"it should have {start + max(each[4] for each in described)}"
            )
        yield StoredTensor(name, path, stamp, dtype, shape, start + first, last - first)
    if start + end != stamp.size:
        raise _BrokenError(f"its tensors end at byte {start + end}, the file has {stamp.size}")


def _described(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, first byte of the data, byte behind the last)."""
    try:
        (first, last), shape = entry["data_offsets"], tuple(entry["shape"])
        if all(type(number) is int and number >= 0 for number in (first, last, *shape)) and first <= last:
            return str(entry["dtype"]), shape, first, last
    except (KeyError, TypeError, ValueError):
        pass
    raise _BrokenError(f"tensor {name} is described as {str(entry)[:100]}")


def check_unchanged(path: Path, stamp: FileStamp, status: os.stat_result) -> None:
    """Raises `ConfigError` if the file is no longer the one whose header was read."""
    now = FileStamp.of(status)
    if now != stamp:
        raise ConfigError(
            f"{path.name} changed while it was read ({change(stamp, now)}); start again when nothing writes to the "
            "checkpoint's folder"
        )


def change(before: FileStamp, now: FileStamp) -> str:
    """What of a file is not as it was."""
    if now.inode != before.inode:
        return "another file has its place"
    if now.size != before.size:
        return f"from {before.size} to {now.size} bytes"
    return "its time of modification"
