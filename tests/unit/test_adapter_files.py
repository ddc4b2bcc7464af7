"""What tells one state of an adapter's files from another: pytest tests/unit/test_adapter_files.py"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cb_backend.support import adapter_files
from cb_backend.support.adapter_files import CONFIG_NAME, SETTLED_S, WEIGHTS_NAME, Stamp, folder_stamp


def write(folder: Path, weights: bytes = b"weights", mtime_s: float = 1e9) -> Path:
    """As a copy makes it that brings the files' times along."""
    folder.mkdir(exist_ok=True)
    for name, data in ((WEIGHTS_NAME, weights), (CONFIG_NAME, b"{}")):
        (folder / name).write_bytes(data)
        os.utime(folder / name, (mtime_s, mtime_s))
    return folder


def stamp_of(folder: Path) -> Stamp:
    stamp = folder_stamp(folder)
    assert stamp is not None
    return stamp


def test_files_that_were_just_copied_have_not_settled_whatever_their_times_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "doll")
    assert not stamp_of(folder).is_settled
    later = time.time() + SETTLED_S + 1
    monkeypatch.setattr(adapter_files.time, "time", lambda: later)
    assert stamp_of(folder).is_settled
    os.utime(folder / CONFIG_NAME, (later + 1000, later + 1000))
    assert stamp_of(folder).is_settled, "a time in the future is some other machine's clock"


def test_contents_of_the_same_times_and_size_in_the_same_files_are_another_state(tmp_path: Path) -> None:
    first = stamp_of(write(tmp_path / "doll"))
    time.sleep(0.02)  # a tick of the file system's clock
    second = stamp_of(write(tmp_path / "doll", b"WEIGHTS"))
    assert (first.mtime_ns, first.size, first.inode) == (second.mtime_ns, second.size, second.inode)
    assert first != second
    assert first.source("doll", "d", is_settled=True) != second.source("doll", "d", is_settled=True)


def test_a_source_is_of_its_own_state_settled_or_not(tmp_path: Path) -> None:
    stamp = stamp_of(write(tmp_path / "doll"))
    other = stamp_of(write(tmp_path / "sheep", b"other weights"))
    for is_settled in (True, False):
        assert stamp.is_of(stamp.source("doll", "d", is_settled))
        assert not other.is_of(stamp.source("doll", "d", is_settled))
