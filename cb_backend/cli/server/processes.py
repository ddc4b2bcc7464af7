"""The processes below a process: list them, see whether they live, end them. Knows `/proc` and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cb_backend.support.process_watch import process_stat


class _Stat(NamedTuple):
    state: str
    parent: int
    session: int
    start_time: int


class ProcessId(NamedTuple):
    """A process, safe against its number being given to another one."""

    pid: int
    start_time: int

    def is_alive(self) -> bool:
        stat = _read_stat(self.pid)
        return stat is not None and stat.start_time == self.start_time and stat.state != "Z"

    def kill(self) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def descendants(pid: int) -> list[ProcessId]:
    """Every living process below `pid`, nearest first."""
    children: dict[int, list[ProcessId]] = {}
    for process, stat in _all_processes():
        children.setdefault(stat.parent, []).append(process)
    found: list[ProcessId] = []
    queue = deque([pid])
    while queue:
        below = children.get(queue.popleft(), [])
        found += below
        queue.extend(process.pid for process in below)
    return found


def session_members(leader: int) -> list[ProcessId]:
    """Living processes of the session that `leader` began, without itself; also after it has ended."""
    return [process for process, stat in _all_processes() if stat.session == leader and process.pid != leader]


def dead_children(pid: int) -> list[ProcessId]:
    """Direct children of `pid` that have ended and that it has not waited for."""
    return [process for process, stat in _all_processes() if stat.parent == pid and stat.state == "Z"]


def _all_processes() -> Iterator[tuple[ProcessId, _Stat]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = _read_stat(int(entry.name))
            if stat is not None:
                yield ProcessId(int(entry.name), stat.start_time), stat


def _read_stat(pid: int) -> _Stat | None:
    fields = process_stat(pid)
    if fields is None:
        return None
    return _Stat(state=fields[0], parent=int(fields[1]), session=int(fields[3]), start_time=int(fields[19]))
