"""Whether whoever lacks a slot for his adapter gets one in the end, whatever the others ask for.

I25: while a request is due, nobody from behind it joins one of the adapters in use. Only once those before it have
joined all that nobody from behind has joined, this begins again, and so often at most as there are slots, or as one of
those before it has taken one that was free: then nobody from behind joins any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.request import Request
from cb_backend.engine.scheduler.scheduler import Scheduler


class TurnChecks:
    """Of one engine's life: stands around what the scheduler is told of those who start with an adapter."""

    def __init__(
        self, scheduler: Scheduler, places: Mapping[int, tuple[float, ...]], has_tenants: bool, counters: Counter[str]
    ) -> None:
        self._turns = scheduler._admission._turns
        self._adapters = scheduler._parts.adapters
        self._queue = scheduler._queue
        self._places, self._has_tenants, self._counters = places, has_tenants, counters
        self._joined = self._turns.joined
        self._turns.joined = self.joined  # type: ignore[method-assign]
        self._due = -1  # id
        self._used: set[AdapterKey] = set()  # when somebody joined last
        self._untouched: set[AdapterKey] = set()  # of them, those that nobody from behind has joined since
        self._prolonged: set[AdapterKey] = set()  # those that somebody before has joined since then
        self._num_left = 0  # times that it may begin again

    def joined(self, request: Request) -> None:
        self._joined(request)
        due, used = self._turns._due, {key for key in self._adapters.resident if self._adapters.is_used(key)}
        if due is None or due.request_id not in self._queue:
            self._due = -1
            return
        if due.request_id != self._due:
            self._due, self._used, self._untouched, self._num_left = (
                due.request_id,
                used,
                used,
                self._adapters.num_slots,
            )
        self._num_left += request.adapter not in self._used
        self._used = used
        is_before = request.request_id in self._turns._before
        if is_before and not self._has_tenants and not request.num_preemptions:
            assert self._places[request.request_id] < self._places[due.request_id], "I25: taken for one before it"
        if is_before or self._queue.has_share_apart(request, due):
            self._counters["joined before the one that is due"] += 1
            self._prolonged.add(request.adapter)
            if (self._untouched & used) <= self._prolonged:
                self._untouched, self._prolonged = used, set()
                self._num_left -= 1
            return
        self._counters["joined behind the one that is due"] += 1
        self._untouched = (self._untouched & used) - {request.adapter}
        assert self._untouched, "I25: all adapters take requests on from behind one that lacks a slot"
        assert self._num_left > 0, "I25: too often those before a request have kept the slots that were emptied for it"


def waits_for_slot(scheduler: Scheduler, request: Request) -> bool:
    """Also if its adapter is one whose slot is emptied."""
    turns = scheduler._admission._turns
    return turns.lacks(request) or request.adapter in turns._emptied
