"""Who waits for a slot of an adapter, and which slot is emptied for him.

Where adapters are more than slots, those in the slots could be asked for without end. So once a request that lacks a
slot has been passed `MAX_OVERTAKEN` times, or was preempted, it is due: one adapter takes nobody on who comes after it,
that with the fewest tokens to come, and its slot is soon free. All others go on starting meanwhile: if nobody might (as
for everything else that is waited for), the batch would run empty for the sake of one slot, and that again and again
(`docs/design/decisions/0015-one-slot-is-emptied.md`). Who comes before the one that is due may join all the same, for
so the order is; then another slot is emptied beside. At worst all are, and from behind nobody joins any adapter.

Where several are due, for so many adapters, more than one slot is emptied at once, but no more than one in
`SLOTS_FOR_ONE`: they stand half empty. This module does not know blocks or steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.request import Request
from cb_backend.engine.scheduler.adapter_slots import AdapterSlots
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN, RequestQueue
from cb_backend.engine.scheduler.slots import SlotTable

SLOTS_FOR_ONE = 8


class AdapterTurns:
    """Of one scheduler. `look` is told who is next before it is asked who must wait."""

    def __init__(self, adapters: AdapterSlots, table: SlotTable, queue: RequestQueue) -> None:
        self._adapters = adapters
        self._table = table
        self._queue = queue
        self._due: Request | None = None  # the first that is
        self._before: set[int] = set()  # ids of those that come before it
        self._emptied: list[AdapterKey] = []  # adapters that take nobody on who comes after it
        self._prolonged: set[AdapterKey] = set()  # of them, those that somebody before it has joined

    def lacks(self, request: Request) -> bool:
        """Whether all slots of adapters are in use, and by others than the request's own."""
        return bool(request.adapter) and not self._adapters.has_room(request.adapter)

    def look(self, first: Sequence[Request]) -> None:
        """These are the first of the queue, in their order: choose whose slots are emptied for those that are due."""
        due = [request for request in first if self._is_due(request)]
        self._due = due[0] if due else None
        if self._due is None:
            self._emptied, self._prolonged = [], set()
            return
        others = first[: first.index(self._due)]
        self._before = {each.request_id for each in others if not self._queue.has_share_apart(self._due, each)}
        self._emptied = [key for key in self._emptied if self._adapters.is_used(key)]
        self._prolonged.intersection_update(self._emptied)
        wanted = min(len({request.adapter for request in due}), max(1, self._adapters.num_slots // SLOTS_FOR_ONE))
        if len(self._emptied) - len(self._prolonged) < wanted:
            self._emptied += self._ending_first()[: wanted - len(self._emptied) + len(self._prolonged)]

    def joined(self, request: Request) -> None:
        """It has started."""
        if request.adapter in self._emptied:
            self._prolonged.add(request.adapter)

    def must_wait(self, request: Request) -> bool:
        """Whether a request waits for a slot: it lacks one, or may not keep one that is emptied."""
        if self._due is not None and request.adapter in self._emptied and request.request_id not in self._before:
            return not self._queue.has_share_apart(request, self._due)
        return self.lacks(request)

    def may_pass(self, request: Request, waiting: Sequence[Request]) -> bool:
        """Whether a request that takes no slot from them may start before these, which wait for one."""
        return all(request.scheduling.priority <= other.scheduling.priority for other in waiting)

    def takes_on(self, key: AdapterKey) -> bool:
        """Whether requests of this adapter may start wherever they stand in the queue."""
        return key not in self._emptied and self._adapters.has_room(key)

    def _is_due(self, request: Request) -> bool:
        return (request.num_overtaken >= MAX_OVERTAKEN or request.num_preemptions > 0) and self.lacks(request)

    def _ending_first(self) -> list[AdapterKey]:
        """Adapters in slots that are not emptied yet, those first whose last running request has the fewest tokens to
        come before its limit; of equals those that came first. Of adapters whose requests have ended, and whose steps
        have not come back, there are none to come."""
        table = self._table
        left = {key: 0 for key in self._adapters.resident if key not in self._emptied}
        for request in table.by_id.values():
            if request.adapter in left:
                slot = request.slot
                done = max(int(table.num_computed_tokens[slot]), int(table.num_prefill_tokens[slot]))
                left[request.adapter] = max(left[request.adapter], int(table.max_computed_tokens[slot]) - done)
        return sorted(left, key=left.__getitem__)
