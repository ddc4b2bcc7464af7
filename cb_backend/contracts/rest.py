"""Sleep and wake as plain data: what an engine is told, what it tells, and what its runner can do about memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from cb_backend.contracts.errors import CbError, ErrorCode

AWAKE, FALLING_ASLEEP, ASLEEP, WAKING, UPDATING = "awake", "falling_asleep", "asleep", "waking", "updating"
WEIGHTS_FILE = "weights"  # of a runtime folder: the folder of the weights that an update has brought; may be empty
LOST_FILE = "weights_lost"  # beside it: why the weights of the last update are not served; may be empty


class NoRoomError(CbError):
    """The device has not so much memory free at this moment; nothing was taken."""

    code = ErrorCode.UNAVAILABLE


class WeightsGoneError(CbError):
    """The weights that a sleeping model is to read again are not there any more; it is asleep as before."""

    code = ErrorCode.UNAVAILABLE


class SetRest(msgspec.Struct, tag=True, frozen=True):
    """Sleep (True) as soon as nothing runs, or wake. Anybody may send it; a `RestAnswer` comes once it is so."""

    is_asleep: bool
    deadline: float | None = None  # time.monotonic() after which it is not to be any more; None: whenever it can be


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Serve the weights of another checkpoint of the same specification. The answer is a `RestAnswer`, afterwards."""

    folder: str
    deadline: float | None = None  # after which it is not to begin any more, as above


class CallOffOrders(msgspec.Struct, tag=True, frozen=True):
    """Whoever sends this does not wait any more for what it has asked for by the two above: each order that has not
    begun is answered, and never done."""


class RestAnswer(msgspec.Struct, tag=True, frozen=True):
    """What has come of a `SetRest` or `UpdateWeights`. `problem`: why nothing has; empty: it has."""

    state: str
    problem: str = ""
    seconds: float = 0.0  # that it took, without waiting for requests


class RestStats(msgspec.Struct, frozen=True, kw_only=True):
    """Of an engine that can sleep. Counts and seconds are since its start."""

    state: str
    num_sleeps: int = 0
    num_wakes: int = 0
    asleep_seconds: float = 0.0  # the present sleep included
    wake_seconds: float = 0.0  # giving it its memory and weights back; per wake: / num_wakes
    num_updates: int = 0
    held_bytes: int = 0  # of weights and cache on the device now
    weights: str = ""  # folder of the weights that are served, where they are not the configured ones
    lost_update: str = ""  # why the configured ones are served after all, though an update had brought others
    update: str = ""  # folder of those that are to take their place as soon as that can be


class SleepLog(Protocol):
    """What is told of each sleep, for the timeline."""

    def slept(self, begin: float, end: float) -> None: ...


class Sleeper(Protocol):
    """The memory of a runner's weights and cache, which goes and comes; nothing runs meanwhile."""

    @property
    def held_bytes(self) -> int:
        """On the device now."""
        ...

    @property
    def needed_bytes(self) -> int:
        """On the device, to be awake."""
        ...

    @property
    def weights(self) -> str:
        """Folder of the weights that are served, where they are not the configured ones; else empty."""
        ...

    def prepare(self) -> bool:
        """Do a small part of what is to be done before the first sleep; True: nothing is left of it."""
        ...

    def sleep(self, tell: Callable[[], None] = lambda: None) -> None:
        """Give the memory up: weights are kept elsewhere, what the cache holds is lost. `tell` is called meanwhile."""
        ...

    def check_wake(self) -> None:
        """Raises `WeightsGoneError` where `wake` would find other weights than those that slept. Costs little."""
        ...

    def wake(self, tell: Callable[[], None], is_filled: bool = True) -> None:
        """Begin to bring everything back; with `is_filled` False all but the weights, which an `update` is to bring
        next. `tell` is called now and then. Raises `NoRoomError` and `WeightsGoneError`, and is asleep as before then.
        """
        ...

    @property
    def is_awake(self) -> bool:
        """Whether what `wake` has begun is done."""
        ...

    def check_update(self, folder: Path) -> None:
        """Raises `ConfigError` for a checkpoint that cannot take the place of the one that is served."""
        ...

    def update(self, folder: Path, tell: Callable[[], None]) -> bytes:
        """Put its weights in the place of the present ones; returns what stands for them in prefix keys.

        Call it awake, after `check_update`. `tell` is called now and then. Raises for files that cannot be read to
        their end, and then `undo_update` must follow.
        """
        ...

    def undo_update(self, tell: Callable[[], None]) -> None:
        """Bring the weights back that were served before. Raises where that cannot be."""
        ...
