"""Models that sleep take turns on a card that cannot hold all of them at once: who has it, who wants it, who may take.

The engines of a machine's user meet in a folder a card, where each keeps a small file that says what it does, of how
much memory, and since when it is in line. A lock is held while one of them decides that it takes memory, never longer:
what it is about to take counts from then on. An engine that has ended is known by its process, and its file is removed
by whoever sees that; one that waits says so again and again, and is passed over when it does not.

Who may take: it has room, and keeps nobody waiting who came before it. That is so where those before it would not have
room even without it and all others who have passed them. Who has passed somebody makes room at once when that is all
that is missing, whatever its own turn; who came before makes room when it is idle, or when its turn is over. So a model
that nobody can make room for keeps no one from memory that is free, and nobody waits longer than for those who came
before it, and for what runs on those who have passed it to end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from cb_backend.support.process_watch import process_start_time

HAS, LOADS, WANTS, RESTS = "has", "loads", "wants", "rests"
LOOK_INTERVAL_S = 0.05
TELL_INTERVAL_S = 1.0  # of who waits
SILENT_S = 10.0  # after which who waits and does not say so is passed over: it does not run
RETRY_S = 0.5  # after memory that looked free was not to be had
_LOCK = "lock"


class Turn(NamedTuple):
    """What an engine does."""

    pid: int
    state: str
    since: float  # its place in line: when it began to want what it has, takes or waits for; time.monotonic
    num_bytes: int  # that it has, is about to take, or waits for
    told: float  # when it said this

    def is_before(self, other: Turn) -> bool:
        return (self.since, self.pid) < (other.since, other.pid)


class Asked(NamedTuple):
    """Somebody waits for the memory that this engine has."""

    since: float
    is_at_once: bool  # it came first, so no turn of this engine's counts


class CardTurns:
    """One engine's part. Not thread-safe."""

    def __init__(
        self,
        folder: Path,
        free_bytes: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        pid: int | None = None,
    ) -> None:
        """`folder` is made where it is not there. `free_bytes`: of the card, now. `clock` is one that all processes of
        a machine share. `pid`: of the process whose turn it is; None: this one."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._free_bytes = free_bytes
        self._clock = clock
        self._pid = os.getpid() if pid is None else pid
        self._file = folder / f"{self._pid}-{process_start_time(self._pid) or 0}"
        self._own = Turn(self._pid, RESTS, 0.0, 0, 0.0)
        self._needed = 0  # what it waits for, whatever it says
        self._next_look = self._next_try = 0.0
        self._others: list[Turn] = []
        self._asked: Asked | None = None

    # ---- what this engine does --------------------------------------------------------------------------------------

    def want(self, num_bytes: int) -> None:
        """It would have so much. Its place in line is that of the first time."""
        self._needed = num_bytes
        if self._own.state != WANTS:
            self._say(WANTS, self._clock(), num_bytes)
        elif self._clock() - self._own.told >= TELL_INTERVAL_S:
            self._say(WANTS, self._own.since, self._own.num_bytes)

    def try_take(self) -> bool:
        """True: it may take the memory that it wants, which is its own from now on. `take`, `put_back` or `rest` says
        what has come of it."""
        return self._decide(self._may_take)

    def take(self, num_bytes: int) -> None:
        """It has this memory."""
        is_new = self._own.state == RESTS
        self._say(HAS, self._clock() if is_new else self._own.since, num_bytes)

    def put_back(self) -> None:
        """It was to take its memory, which was not to be had. It waits on in its place, for more than there is now."""
        self._next_try = self._clock() + RETRY_S
        self._say(WANTS, self._own.since, max(self._needed, self._free_bytes() + 1))

    def rest(self) -> None:
        """It has given its memory up, and wants nothing."""
        if self._own.state != RESTS:
            self._say(RESTS, 0.0, 0)

    def try_start(self) -> bool:
        """The same for a model that is to be loaded: also where nobody is left that could make room. What it lacks then
        is told by its load."""
        return self._decide(lambda: self._may_take() or not self.is_taken)

    def take_when_free(self, num_bytes: int, tell: Callable[[str], None]) -> None:
        """Wait until `try_start` lets a model be loaded."""
        is_told = False
        self.want(num_bytes)
        while not self.try_start():
            if not is_told:
                tell("waiting for the card: a model that has it is asked to make room")
                is_told = True
            time.sleep(LOOK_INTERVAL_S)
            self.want(num_bytes)

    @property
    def is_in_line(self) -> bool:
        """Whether it waits for memory."""
        return self._own.state == WANTS

    # ---- what the others do -----------------------------------------------------------------------------------------

    @property
    def asked(self) -> Asked | None:
        """Whether this engine, which has memory, is to make room; as it was some milliseconds ago at most."""
        if self._clock() >= self._next_look:
            self._look()
            self._asked = self._find_asked() if self._own.state == HAS else None
        return self._asked

    @property
    def is_taken(self) -> bool:
        """Whether one of the others has memory of the card, or is about to, and may make room; when last looked."""
        return any(turn.state in (HAS, LOADS) for turn in self._others)

    def _may_take(self) -> bool:
        own, room = self._own, self._room()
        if self._needed > room or self._clock() < self._next_try:
            return False
        before = (turn for turn in self._waiting() if turn.is_before(own))
        return all(turn.num_bytes > room + _sum_bytes(self._passed(turn)) for turn in before)

    def _find_asked(self) -> Asked | None:
        """The one that came before this engine counts more than any that came after it."""
        own, waiting = self._own, self._waiting()
        if not waiting:
            return None
        room, after = self._room(), []
        for turn in waiting:
            if turn.num_bytes <= room:
                continue  # it takes it at any moment
            if own.is_before(turn):
                after.append(turn.since)
            elif turn.num_bytes <= room + _sum_bytes(self._passed(turn)) + own.num_bytes:
                return Asked(turn.since, is_at_once=True)
        return Asked(min(after), is_at_once=False) if after else None

    def _waiting(self) -> list[Turn]:
        now = self._clock()
        return [turn for turn in self._others if turn.state == WANTS and now - turn.told <= SILENT_S]

    def _passed(self, waiting: Turn) -> list[Turn]:
        """Those of the others who have memory though they came later."""
        return [turn for turn in self._others if turn.state in (HAS, LOADS) and waiting.is_before(turn)]

    def _room(self) -> int:
        """Bytes that are free, and that nobody is about to take. One that loads may have taken some of its share."""
        return self._free_bytes() - _sum_bytes([turn for turn in self._others if turn.state == LOADS])

    # ---- files ------------------------------------------------------------------------------------------------------

    def _decide(self, may_take: Callable[[], bool]) -> bool:
        """Ask it, with what is so now, and say that this engine takes its memory if it may."""
        with _alone(self._folder / _LOCK) as is_alone:
            if not is_alone:  # in a moment
                return False
            self._look()
            if not may_take():
                return False
            self._say(LOADS, self._own.since, self._needed)
            return True

    def _say(self, state: str, since: float, num_bytes: int) -> None:
        self._own = Turn(self._pid, state, since, num_bytes, self._clock())
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(self._own))
        temporary.replace(self._file)
        self._next_look = 0.0

    def _look(self) -> None:
        self._next_look = self._clock() + LOOK_INTERVAL_S
        found = (_read(path) for path in self._folder.iterdir() if path != self._file)
        self._others = [turn for turn in found if turn is not None]


def _sum_bytes(turns: list[Turn]) -> int:
    return sum(turn.num_bytes for turn in turns)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[bool]:
    """Whether nobody else decides at this moment. A process that ends lets go of its lock."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _read(path: Path) -> Turn | None:
    """None for what is no engine's; the files of an engine that has ended are removed."""
    pid, _, start_time = path.name.removesuffix(".new").partition("-")
    if not (pid.isdigit() and start_time.isdigit()):
        return None
    try:
        if (process_start_time(int(pid)) or -1) != int(start_time):
            path.unlink()
            return None
        turn = Turn(*json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # just removed, or of another version
        return None
    is_whole = isinstance(turn.since, float) and isinstance(turn.told, float) and isinstance(turn.num_bytes, int)
    return turn if is_whole and path.suffix != ".new" else None
