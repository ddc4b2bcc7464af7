"""What is left of stubs that were killed, or whose server was: shared memory, which 24.10 never removes, or themselves.

Each front end notes its process and the name of its region in the runtime folder of its model; whoever starts or ends
next removes the regions of those that are gone. Once the server is gone, the engine, or whoever comes next, also ends
stubs that cannot end themselves. It knows the stub's command line and nothing else of the server.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from cb_backend.support.process_watch import ProcessWatch, process_start_time

SHARED_MEMORY = Path("/dev/shm")
REGION_PREFIX = "triton_python_backend_shm_region_"
KILLED_S = 5.0  # what a killed process may take to be gone


def regions_of(command_line: bytes) -> list[str]:
    """The regions that a stub's command line names."""
    return list(filter(_is_region, command_line.decode(errors="replace").split("\0")))


def _is_region(name: str) -> bool:
    return name.startswith(REGION_PREFIX) and "/" not in name


def remove_regions(names: list[str]) -> None:
    for name in filter(_is_region, names):
        with contextlib.suppress(OSError):
            (SHARED_MEMORY / name).unlink()


def note_regions(folder: Path, command_line: bytes) -> None:
    """Write down this process's regions, for the time after a sudden end of it."""
    pid = os.getpid()
    (folder / f"regions-{pid}-{process_start_time(pid) or 0}").write_text("\n".join(regions_of(command_line)))


def remove_regions_of_the_dead(folder: Path) -> None:
    """Remove what is noted of processes that are gone."""
    for note in _notes(folder):
        pid, start_time = _process_of(note)
        if process_start_time(pid) != start_time:
            with contextlib.suppress(OSError):
                remove_regions(note.read_text().splitlines())
                note.unlink()


def end_stubs(folder: Path, grace_s: float = 0.0) -> None:
    """For the time when their server is gone: end the stubs that are noted here, and remove their regions.

    They end by themselves, unless a thread of theirs waits for the server and holds Python's lock. Who still lives
    after `grace_s` seconds is killed; nothing is lost with it.
    """
    stubs = [watch for note in _notes(folder) if (watch := _stub_of(note)) is not None]
    _wait_for_ends(stubs, grace_s)
    for stub in stubs:
        if stub.is_alive:
            with contextlib.suppress(OSError):
                stub.kill()
    _wait_for_ends(stubs, KILLED_S)
    for stub in stubs:
        stub.close()
    remove_regions_of_the_dead(folder)


def _stub_of(note: Path) -> ProcessWatch | None:
    """The noted process if it is a stub and lives: the one that maps the noted regions, by its own command line."""
    pid, start_time = _process_of(note)
    watch = ProcessWatch(pid, start_time)
    with contextlib.suppress(OSError):
        names = note.read_text().splitlines()
        if names and names == regions_of(Path(f"/proc/{pid}/cmdline").read_bytes()) and watch.is_alive:
            return watch
    watch.close()
    return None


def _notes(folder: Path) -> list[Path]:
    return [path for path in folder.glob("regions-*") if re.fullmatch(r"regions-\d+-\d+", path.name)]


def _process_of(note: Path) -> tuple[int, int]:
    """Pid and start time."""
    pid, _, start_time = note.name.removeprefix("regions-").partition("-")
    return int(pid), int(start_time)


def _wait_for_ends(watches: list[ProcessWatch], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(watch.is_alive for watch in watches) and time.monotonic() < deadline:
        time.sleep(0.02)
