"""Why a rank could not load its part of the model: left by it in the folder where the ranks meet, for rank 0 to tell.

One rank's fault is every other's too, as soon as its connections end: the first one told is the cause.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec

from cb_backend.contracts.errors import ConfigError
from cb_backend.support.whole_files import write_whole

_SUFFIX = ".fault"
_KINDS: dict[str, type[Exception]] = {"config": ConfigError, "memory": MemoryError}  # whose reason says all


class _Fault(msgspec.Struct, frozen=True):
    told_at: int  # nanoseconds, by the clock of the host
    rank: int
    kind: str  # of `_KINDS`; empty: another
    reason: str

    def as_error(self) -> Exception:
        if self.kind:
            return _KINDS[self.kind](f"rank {self.rank}: {self.reason}")
        return RuntimeError(f"rank {self.rank} could not load its part of the model; its reason is above in the log")


def leave_fault(folder: Path, rank: int, error: Exception) -> None:
    """To be called before anything of the rank ends. Whoever cannot write says it in the log alone."""
    kind = next((name for name, each in _KINDS.items() if isinstance(error, each)), "")
    fault = _Fault(time.monotonic_ns(), rank, kind, str(error))
    with contextlib.suppress(OSError):
        write_whole(folder / f"rank{rank}{_SUFFIX}", msgspec.json.encode(fault).decode())


def first_fault(folder: Path) -> Exception | None:
    """Of those that ranks have left there: what rank 0 is to raise. None: none has."""
    faults = [msgspec.json.decode(path.read_bytes(), type=_Fault) for path in folder.glob(f"*{_SUFFIX}")]
    return min(faults, key=lambda fault: fault.told_at).as_error() if faults else None
