"""What killed front ends leave in /dev/shm is removed, and nothing else. pytest tests/serving/test_shared_regions.py"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cb_backend.support import shared_regions
from cb_backend.support.process_watch import process_start_time
from cb_backend.support.shared_regions import (
    REGION_PREFIX,
    end_stubs,
    note_regions,
    regions_of,
    remove_regions,
    remove_regions_of_the_dead,
)
from tests.waiting import WAIT_S


@pytest.fixture
def make_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes files in a folder that stands in for /dev/shm."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(shared_regions, "SHARED_MEMORY", tmp_path / "shm")

    def make(name: str) -> Path:
        path = tmp_path / "shm" / f"{REGION_PREFIX}{name}"
        path.touch()
        return path

    return make


def command_line(*words: str) -> bytes:
    return "\0".join(("stub", "/models/llm/1/model.py", *words, "1048576", "")).encode()


def test_only_the_region_that_the_command_line_names_is_removed(
    tmp_path: Path, make_region: Callable[[str], Path]
) -> None:
    mine, other = make_region("1a"), make_region("2b")
    outside = tmp_path / f"{REGION_PREFIX}3c"
    outside.touch()
    names = regions_of(command_line(mine.name, f"{REGION_PREFIX}/../../{outside.name}"))
    assert names == [mine.name]
    remove_regions([*names, f"../{outside.name}"])
    remove_regions(names)  # it is no error that it is gone
    assert (mine.exists(), other.exists(), outside.exists()) == (False, True, True)


def test_the_regions_of_the_dead_are_removed_and_those_of_the_living_stay(
    tmp_path: Path, make_region: Callable[[str], Path]
) -> None:
    mine, dead = make_region("1a"), make_region("2b")
    folder = tmp_path / "runtime"
    folder.mkdir()
    note_regions(folder, command_line(mine.name))
    (folder / "regions-999999999-5").write_text(dead.name)
    remove_regions_of_the_dead(folder)
    assert (mine.exists(), dead.exists()) == (True, False)
    assert len(list(folder.iterdir())) == 1, "the note of the dead is gone with its region"
    remove_regions_of_the_dead(folder)
    remove_regions_of_the_dead(tmp_path / "gone")


def test_nobody_is_ended_but_the_stub_that_is_noted(tmp_path: Path, make_region: Callable[[str], Path]) -> None:
    """Not who has the pid of one that is gone, nor who has no region and so is no stub: this process for example."""
    dead, unknown = make_region("2b"), make_region("3c")
    sleeper = "import sys, time; print(flush=True); time.sleep(3600)"
    other = subprocess.Popen([sys.executable, "-c", sleeper, unknown.name], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    pid = other.pid
    start_time = process_start_time(pid)
    assert start_time is not None
    note_regions(tmp_path, command_line())  # ours
    (tmp_path / f"regions-{pid}-{start_time}").write_text(dead.name)  # not what its command line says
    (tmp_path / f"regions-{pid}-{start_time - 1}").write_text(unknown.name)  # of an earlier process
    end_stubs(tmp_path)
    assert other.poll() is None
    assert dead.exists()
    (tmp_path / f"regions-{pid}-{start_time}").write_text(unknown.name)
    end_stubs(tmp_path)
    assert other.wait(WAIT_S) == -signal.SIGKILL
    other.stdout.close()
