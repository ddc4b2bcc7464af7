"""The shared memory of front ends that were killed: the server (24.10) leaves it behind, even when it ends.

Each front end notes the name of its region in the runtime folder of its model; whoever starts or ends next removes the
regions of those that are gone. It knows the stub's command line and nothing else of the server.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cb_backend.process_watch import process_start_time

SHARED_MEMORY = Path("/dev/shm")
REGION_PREFIX = "triton_python_backend_shm_region_"


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
    for note in folder.glob("regions-*"):
        pid, _, start_time = note.name.removeprefix("regions-").partition("-")
        if str(process_start_time(int(pid))) != start_time:
            with contextlib.suppress(OSError):
                remove_regions(note.read_text().splitlines())
                note.unlink()
