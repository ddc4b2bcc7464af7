"""How much of the host's memory may still be taken: what the system has, or what its container leaves, if that is less.

A container's limit is its control group's (https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files;
version 1: cgroup-v1/memory.html). The kernel ends processes that pass it, whatever `/proc/meminfo` says is available.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Files(NamedTuple):
    """Names in a group's folder, and of the line of `memory.stat` with what the kernel drops when memory is short."""

    folder: str  # where groups are mounted
    limit: str
    used: str
    droppable: str


_VERSION_2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_VERSION_1 = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(free, total) bytes, free without swapping. `root` holds `proc` and `sys`."""
    kib = _numbers((root / "proc/meminfo").read_text().replace(":", " "))
    free, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    for group, files in _groups(root):
        try:
            limit = int((group / files.limit).read_text())  # ValueError: "max"
            used = int((group / files.used).read_text())
            droppable = _numbers((group / "memory.stat").read_text()).get(files.droppable, 0)
        except (OSError, ValueError):
            continue  # no limit in this group
        total = min(total, limit)
        free = min(free, max(0, limit - used + droppable))
    return free, total


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of this process's memory groups, the innermost first; each may have a limit of its own."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _VERSION_1 if controllers else _VERSION_2
        mount = root / files.folder
        # NOTE: inside a container of version 1 the path is the host's, and the mount itself is the container's group.
        group = mount / path.lstrip("/")
        while group != mount:
            yield group, files
            group = group.parent
        yield mount, files


def _numbers(text: str) -> dict[str, int]:
    """Lines of `name number [unit]`."""
    return {name: int(number) for name, number, *_ in map(str.split, text.splitlines())}
