"""An adapter's files: what is another source, and a disk that hangs: pytest tests/front_end/test_adapter_sources.py"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from cb_backend.contracts.errors import InvalidRequestError, UnavailableError
from cb_backend.front_end import adapters
from cb_backend.front_end.adapters import (
    LOOK_INTERVAL_S,
    AdapterFolder,
    ListedAdapters,
)
from cb_backend.support import adapter_files
from cb_backend.support.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from tests.front_end.adapter_folders import AGE_S, Clock, aged, clock, whole_age, write_adapter, write_list

__all__ = ["clock", "whole_age"]  # fixtures


def test_a_changed_file_is_another_source_once_it_has_settled(tmp_path: Path, clock: Clock) -> None:
    folder = AdapterFolder("doll", write_adapter(tmp_path / "d"), clock)
    first = folder.source()
    assert (first.size, first.name) == (len(b"weights") + len(b"{}"), "doll")
    clock.now += LOOK_INTERVAL_S
    assert folder.source() == first
    write_adapter(tmp_path / "d", b"half", age_s=0.0)
    clock.now += LOOK_INTERVAL_S
    assert folder.source() == first, "somebody may still be writing it"
    write_adapter(tmp_path / "d", b"whole and other", age_s=AGE_S / 2)
    clock.now += LOOK_INTERVAL_S
    second = folder.source()
    assert second.size == len(b"whole and other") + len(b"{}")
    assert second.mtime_ns > first.mtime_ns


def test_a_copy_that_keeps_times_counts_once_both_its_files_are_there(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rsync -a makes it, and tar: each file is as old as where it came from."""
    live, new = write_adapter(tmp_path / "live"), write_adapter(tmp_path / "new", b"other weights", age_s=AGE_S / 2)
    changed_at: dict[int, int] = {}  # by inode
    now = time.time_ns()
    monkeypatch.setattr(adapter_files, "changed_ns", lambda status: changed_at.get(status.st_ino, status.st_mtime_ns))
    monkeypatch.setattr(adapter_files.time, "time", lambda: now / 1e9)
    folder = AdapterFolder("doll", live, clock)
    first = folder.source()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        shutil.copy2(new / name, live / f".{name}")
        changed_at[(live / f".{name}").stat().st_ino] = now
        (live / f".{name}").replace(live / name)
        clock.now += LOOK_INTERVAL_S
        assert folder.source() == first, "the other file may be on its way"
    now += 2 * 10**9
    clock.now += LOOK_INTERVAL_S
    assert folder.source().size == len(b"other weights") + len(b"{}")


def test_files_that_are_gone_stay_what_they_were(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    folder = AdapterFolder("doll", write_adapter(tmp_path / "d"), clock)
    first = folder.source()
    (tmp_path / "d" / WEIGHTS_NAME).unlink()
    for _ in range(3):
        clock.now += LOOK_INTERVAL_S
        assert folder.source() == first
    assert sum("are not in" in record.message for record in caplog.records) == 1


def test_files_that_never_were_are_the_engines_to_refuse(tmp_path: Path, clock: Clock) -> None:
    source = AdapterFolder("doll", tmp_path / "nowhere", clock).source()
    assert (source.path, source.mtime_ns, source.size) == (str(tmp_path / "nowhere"), 0, 0)


def test_a_name_that_moves_to_another_folder_is_another_source(tmp_path: Path, clock: Clock) -> None:
    write_adapter(tmp_path / "v1")
    write_adapter(tmp_path / "v2", b"other weights")
    adapters = ListedAdapters(write_list(tmp_path, {"doll": "v1"}), clock)
    first = adapters.find("doll")
    write_list(tmp_path, {"doll": "v2"}, age_s=AGE_S / 2)
    clock.now += LOOK_INTERVAL_S
    second = adapters.find("doll")
    assert first is not None
    assert second is not None
    assert (Path(first.path).name, Path(second.path).name) == ("v1", "v2")


@pytest.mark.parametrize("way", ["link", "rename"])
def test_other_files_of_the_same_time_and_size_are_another_source(tmp_path: Path, clock: Clock, way: str) -> None:
    """As of archives and images whose files all have one time: adapters of one model and rank are of one size too."""
    for name, weights in (("v1", b"weights"), ("v2", b"WEIGHTS")):
        for file in write_adapter(tmp_path / name, weights).iterdir():
            os.utime(file, (10**9, 10**9))
    place = tmp_path / "d"
    if way == "link":
        place.symlink_to("v1")
    else:
        (tmp_path / "v1").rename(place)
    folder = AdapterFolder("doll", place, clock)
    first = folder.source()
    clock.now += LOOK_INTERVAL_S
    assert folder.source() == first
    if way == "link":
        (tmp_path / "new").symlink_to("v2")
        (tmp_path / "new").replace(place)
    else:
        (tmp_path / "v2" / WEIGHTS_NAME).replace(place / WEIGHTS_NAME)
    clock.now += LOOK_INTERVAL_S
    second = folder.source()
    assert (second.mtime_ns, second.size) == (first.mtime_ns, first.size)
    assert second != first


def test_files_written_again_within_one_tick_are_read_again(clock: Clock, tmp_path: Path) -> None:
    """The engine may have read what stood there first; time, size and file are those of what stands there now."""
    folder = AdapterFolder("doll", write_adapter(tmp_path / "doll", b"first..", age_s=0.0), clock)
    first = folder.source()
    times = (tmp_path / "doll" / WEIGHTS_NAME).stat()
    (tmp_path / "doll" / WEIGHTS_NAME).write_bytes(b"second.")
    os.utime(tmp_path / "doll" / WEIGHTS_NAME, ns=(times.st_atime_ns, times.st_mtime_ns))
    clock.now += LOOK_INTERVAL_S
    assert folder.source() == first, "nobody can tell them apart yet"
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        aged(tmp_path / "doll" / name, 2.0)  # time goes by
    settled_at_the_first_look = AdapterFolder("doll", tmp_path / "doll", clock).source()
    clock.now += LOOK_INTERVAL_S
    second = folder.source()
    assert second == settled_at_the_first_look
    assert second.file_id != first.file_id, "another source, so the engine reads the files again"
    clock.now += LOOK_INTERVAL_S
    assert folder.source() == second


class HungFolder:
    """A file system that does not answer while it is told so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hung: Path) -> None:
        self.num_looks = 0
        self.answers = threading.Event()
        look = adapter_files.folder_stamp

        def hanging(folder: Path) -> adapter_files.Stamp | None:
            if folder == hung:
                self.num_looks += 1
                assert self.answers.wait(60)
            return look(folder)

        monkeypatch.setattr(adapters, "folder_stamp", hanging)
        monkeypatch.setattr(adapters, "LOOK_TIMEOUT_S", 0.05)


@pytest.fixture
def listed(clock: Clock, tmp_path: Path) -> ListedAdapters:
    for name in ("doll", "sheep"):
        write_adapter(tmp_path / name)
    return ListedAdapters(write_list(tmp_path, {"doll": "doll", "sheep": "sheep"}), clock)


def test_a_folder_that_does_not_answer_holds_up_nobody_else(
    listed: ListedAdapters, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = HungFolder(monkeypatch, tmp_path / "doll")
    for _ in range(5):
        with pytest.raises(UnavailableError, match=r"adapter 'doll'.*doll does not answer.*file system.*try again"):
            listed.find("doll")
        sheep = listed.find("sheep")
        assert sheep is not None
        assert sheep.size
        clock.now += LOOK_INTERVAL_S
    assert folder.num_looks == 1, "one thread waits, not one a request"
    folder.answers.set()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            found = listed.find("doll")
        except UnavailableError:
            clock.now += LOOK_INTERVAL_S
            time.sleep(0.01)
        else:
            assert found is not None
            assert found.size
            return
    pytest.fail("it answers again, and is not found")


def test_what_is_known_of_a_folder_goes_on_while_it_does_not_answer(
    listed: ListedAdapters, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may have it in memory."""
    before = listed.find("doll")
    folder = HungFolder(monkeypatch, tmp_path / "doll")
    for _ in range(3):
        clock.now += LOOK_INTERVAL_S
        assert listed.find("doll") == before
    assert folder.num_looks == 1
    folder.answers.set()


def test_a_list_that_does_not_answer_stays_as_it_was(
    listed: ListedAdapters, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    stamp_of = adapter_files.stamp_of

    def hanging(path: Path) -> adapter_files.Stamp | None:
        assert answers.wait(60)
        return stamp_of(path)

    monkeypatch.setattr(adapters, "stamp_of", hanging)
    monkeypatch.setattr(adapters, "LOOK_TIMEOUT_S", 0.05)
    write_list(tmp_path, {"sheep": "sheep"})
    clock.now += LOOK_INTERVAL_S
    assert listed.find("doll") is not None
    with pytest.raises(InvalidRequestError, match="LoRA bactrian is not supported"):
        listed.find("bactrian")
    answers.set()
    deadline = time.monotonic() + 30
    while listed.names != ["sheep"] and time.monotonic() < deadline:
        clock.now += LOOK_INTERVAL_S
        listed.find("sheep")
        time.sleep(0.01)
    assert listed.names == ["sheep"]
