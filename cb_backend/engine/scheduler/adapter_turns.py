"""Who waits for a slot of an adapter, and which slot is emptied for him.

Where adapters are more than slots, those in the slots could be asked for without end. So once a request that lacks a
slot has been passed `MAX_OVERTAKEN` times, or was preempted, one adapter takes nobody on who comes after it: the one
whose running requests are to end first. They do end, and its slot is free. All others go on starting meanwhile: if
nobody might (as for everything else that is waited for), the batch would run empty for the sake of one slot, and that
again and again (`docs/design/decisions/0015-one-slot-is-emptied.md`). One slot at a time: more would stand half empty.
This module does not know blocks or steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.request import Request
from cb_backend.contracts.scheduling import MAX_PRIORITY
from cb_backend.engine.scheduler.adapter_slots import AdapterSlots
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN
from cb_backend.engine.scheduler.slots import SlotTable

_NONE: AdapterKey = b""


class AdapterTurns:
    """Of one scheduler. `look` is told who is next before it is asked who must wait."""

    def __init__(self, adapters: AdapterSlots, table: SlotTable) -> None:
        self._adapters = adapters
        self._table = table
        self._emptied = _NONE  # the adapter that takes nobody on who comes after the one that is due
        self._before: set[int] = set()  # ids of those that come before that one

    def lacks(self, request: Request) -> bool:
        """Whether all slots of adapters are in use, and by others than the request's own."""
        return bool(request.adapter) and not self._adapters.has_room(request.adapter)

    def look(self, first: Sequence[Request]) -> None:
        """These are the first of the queue, in their order: choose whose slot is emptied for the first that is due."""
        place = next((place for place, request in enumerate(first) if self._is_due(request)), None)
        if place is None:
            self._emptied = _NONE
            return
        self._before = {request.request_id for request in first[:place]}
        if not self._adapters.is_used(self._emptied):
            self._emptied = self._ending_first()

    def must_wait(self, request: Request) -> bool:
        """Whether a request waits for a slot: it lacks one, or may not keep the one that is emptied."""
        is_emptied = request.adapter == self._emptied and bool(self._emptied)
        return (is_emptied and request.request_id not in self._before) or self.lacks(request)

    def that_may_start(self, first: Iterable[Request]) -> list[Request]:
        """Of the first of each adapter, in their order, those that need not wait, and pass nobody more urgent."""
        found, most_urgent = [], MAX_PRIORITY
        for request in first:
            priority = request.scheduling.priority
            if self.must_wait(request):
                most_urgent = min(most_urgent, priority)
            elif priority <= most_urgent:
                found.append(request)
        return found

    def _is_due(self, request: Request) -> bool:
        return (request.num_overtaken >= MAX_OVERTAKEN or request.num_preemptions > 0) and self.lacks(request)

    def _ending_first(self) -> AdapterKey:
        """The adapter whose last running request has the fewest tokens before its limit; of equals the one that is
        longest in its slot. Those that have ended, and whose steps have not come back, have none left."""
        table, left = self._table, dict.fromkeys(self._adapters.resident, 0)
        for request in table.by_id.values():
            if request.adapter in left:
                own = int(table.max_computed_tokens[request.slot] - table.num_computed_tokens[request.slot])
                left[request.adapter] = max(left[request.adapter], own)
        return min(left, key=left.__getitem__, default=_NONE)
