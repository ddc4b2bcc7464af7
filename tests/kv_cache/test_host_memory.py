"""What the host can give, also within a container: pytest tests/kv_cache/test_host_memory.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.kv_cache.host_memory import host_memory

GIB = 1 << 30
MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {12 * GIB // 1024} kB\nHugePages_Total: 0\n"
VERSION_2, VERSION_1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """16 GiB, of which 12 are available; no groups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def limit(host: Path, group: str, limit: int | str, used: int, droppable: int) -> None:
    """Write a group's files, all names of its version."""
    folder = host / group
    folder.mkdir(parents=True, exist_ok=True)
    is_first = group.startswith(VERSION_1)
    (folder / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if is_first else "memory.current")).write_text(f"{used}\n")
    own = 7 if is_first else droppable  # of version 1 the group's own pages: those of groups within count too
    (folder / "memory.stat").write_text(f"cache 5\ninactive_file {own}\ntotal_inactive_file {droppable}\n")


def is_in(host: Path, lines: str) -> None:
    (host / "proc/self/cgroup").write_text(lines)


def test_without_groups_it_is_the_systems(host: Path) -> None:
    assert host_memory(host) == (12 * GIB, 16 * GIB)
    is_in(host, "0::/\n")  # the root group has no limit
    assert host_memory(host) == (12 * GIB, 16 * GIB)


def test_a_containers_limit_counts(host: Path) -> None:
    """Seen from within: its group is the mount itself. Page cache that can be dropped is free."""
    is_in(host, "0::/\n")
    limit(host, VERSION_2, 4 * GIB, used=3 * GIB, droppable=GIB)
    assert host_memory(host) == (2 * GIB, 4 * GIB)
    limit(host, VERSION_2, "max", used=3 * GIB, droppable=GIB)
    assert host_memory(host) == (12 * GIB, 16 * GIB)


def test_the_tightest_of_the_groups_around_counts(host: Path) -> None:
    """A pod's limit around a container without one, and a limit larger than the machine."""
    is_in(host, "0::/pod/container\n")
    limit(host, f"{VERSION_2}/pod", 6 * GIB, used=5 * GIB, droppable=0)
    limit(host, f"{VERSION_2}/pod/container", "max", used=GIB, droppable=0)
    assert host_memory(host) == (GIB, 6 * GIB)
    limit(host, f"{VERSION_2}/pod/container", 64 * GIB, used=GIB, droppable=0)
    assert host_memory(host) == (GIB, 6 * GIB)


def test_groups_of_version_1(host: Path) -> None:
    """Unlimited there is a huge number; within a container the path is the host's and does not exist."""
    is_in(host, "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n")
    limit(host, VERSION_1, 9223372036854771712, used=GIB, droppable=0)
    assert host_memory(host) == (12 * GIB, 16 * GIB)
    limit(host, VERSION_1, 2 * GIB, used=GIB, droppable=GIB // 2)
    assert host_memory(host) == (3 * GIB // 2, 2 * GIB)
    limit(host, f"{VERSION_1}/docker/abc", GIB, used=2 * GIB, droppable=0)
    assert host_memory(host) == (0, GIB)  # lowered below what is used
