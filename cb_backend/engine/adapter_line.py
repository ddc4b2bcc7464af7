"""Who waits for room in host memory for his adapter, and whom he lets pass.

Room comes free when nobody needs an adapter that is kept. If others asked for those without end, none ever would; so
nobody who waits is passed more than `MAX_OVERTAKEN` times. From then on those after him in the queue's order wait as
well, whatever they ask for.

That ends: nobody after him is given an adapter any more, those before him are finitely many, and whoever has his
adapter, running, preempted or waiting, asks for nothing here again. So they all come to their ends, one adapter is then
needed by nobody, and as the first of the line he alone may read into its room. Requests without adapters take no part.
This module does not know files or memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from cb_backend.contracts.scheduling import Rank
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN


@dataclass(order=True)
class Turn:
    """A request's, in the queue's order."""

    rank: Rank
    number: int
    num_overtaken: int = field(default=0, compare=False)  # times that a later one was given its adapter meanwhile
    has_asked: bool = field(default=False, compare=False)  # in this round


class RoomLine:
    """Asked for each request in every round: who has not asked in a whole round waits no longer."""

    def __init__(self) -> None:
        self._line: list[Turn] = []  # sorted
        self._barrier: Turn | None = None  # the first who has been passed often enough
        self._num_turns = 0

    def new_turn(self, rank: Rank) -> Turn:
        """Of a request that has just arrived; it does not wait yet."""
        self._num_turns += 1
        return Turn(rank, self._num_turns)

    def may_pass(self, turn: Turn) -> bool:
        """Whether nobody before it has been passed too often."""
        return self._barrier is None or turn <= self._barrier

    def is_first(self, turn: Turn) -> bool:
        """Whether nobody before it waits: room that comes free is his who has waited longest."""
        return not self._line or turn <= self._line[0]

    def wait(self, turn: Turn) -> None:
        """It found no room in this round, or may not pass."""
        turn.has_asked = True
        if self._place_of(turn) is None:
            insort(self._line, turn)
            if turn.num_overtaken >= MAX_OVERTAKEN:  # it waited before
                self._find_barrier()

    def leave(self, turn: Turn) -> None:
        """It has room, or nothing to wait for any more."""
        if self._line and (place := self._place_of(turn)) is not None:
            del self._line[place]
            if turn is self._barrier:
                self._find_barrier()

    def pass_others(self, turn: Turn) -> None:
        """It has been given its adapter, before those who came before it and wait."""
        passed = self._line[: bisect_left(self._line, turn)]
        for other in passed:
            other.num_overtaken += 1
        if passed:
            self._find_barrier()

    def end_round(self) -> None:
        """Everybody who waits has asked."""
        if self._line:
            self._line = [turn for turn in self._line if turn.has_asked]
            for turn in self._line:
                turn.has_asked = False
            self._find_barrier()

    def _place_of(self, turn: Turn) -> int | None:
        place = bisect_left(self._line, turn)
        return place if place < len(self._line) and self._line[place] is turn else None

    def _find_barrier(self) -> None:
        self._barrier = next((turn for turn in self._line if turn.num_overtaken >= MAX_OVERTAKEN), None)
