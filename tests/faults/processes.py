"""What the processes of a server hold at one moment: memory, files, threads, shared memory. Knows /proc only."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Held:
    """Of one process."""

    memory_mb: float  # RssAnon + VmSwap
    num_files: int
    num_threads: int


def held_by(pid: int) -> Held | None:
    """None if the process is gone."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        kilobytes = sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
        num_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return Held(kilobytes / 1024, num_files, int(fields["Threads"]))
    return None


def shared_memory_mb(pids: Sequence[int]) -> float:
    """Pages in use of the regions in /dev/shm that these processes have mapped."""
    names = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if str(SHARED_MEMORY) in line:
                    names.add(line.split(None, 5)[5])
    sizes = []
    for name in names:
        with contextlib.suppress(OSError):
            sizes.append(Path(name).stat().st_blocks * 512)
    return sum(sizes) / (1 << 20)


def slope_per_hour(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Least squares: growth an hour, and its standard error from the scatter around the line (as if independent)."""
    x = np.asarray(times) / 3600.0
    y = np.asarray(values, np.float64)
    x = x - x.mean()
    spread = float((x**2).sum())
    if len(x) < 3 or spread == 0.0:
        return 0.0, float("inf")
    slope = float((x * y).sum()) / spread
    residual = y - y.mean() - slope * x
    return slope, float(np.sqrt((residual**2).sum() / (len(x) - 2) / spread))
