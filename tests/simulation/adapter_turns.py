"""Whether whoever lacks a slot for his adapter gets one in the end, computed from the documents.

I25: once the head of the queue has been passed `MAX_OVERTAKEN` times while it lacked a slot, one of the adapters in the
slots takes nobody on who comes after it, until it has a slot. Nobody less urgent passes it, however often it is passed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.request import Request
from cb_backend.contracts.step import StepPlan
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN

if TYPE_CHECKING:
    from tests.simulation.checks import CheckedEngine


class TurnChecks:
    """Of one engine's life; told every plan."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._head = -1  # id of who was first when the last plan had been made, and lacked a slot
        self._num_passed = 0
        self._untouched: set[AdapterKey] | None = None  # adapters that nobody has joined since it was passed too often

    def check(self, checked: CheckedEngine, plan: StepPlan) -> None:
        head = min(checked.scheduler._queue, key=lambda request: checked.places[request.request_id], default=None)
        if head is None or checked.has_tenants or not lacks_slot(checked, head.adapter):
            self._head = -1
            return
        if head.request_id != self._head:
            self._head, self._num_passed, self._untouched = head.request_id, 0, None
            return
        reserved = checked.config.reserved_priority if checked.config.reserved_share else -1000
        for row in plan.joined:
            joined = checked.requests[row.request_id]
            is_apart = joined.scheduling.priority <= reserved < head.scheduling.priority
            is_before = joined.num_preemptions or checked.places[row.request_id] < checked.places[head.request_id]
            if is_apart or is_before:  # who is back goes before all newcomers
                continue
            self._num_passed += 1
            if self._untouched is not None:
                self._untouched.discard(joined.adapter)
                self._counters["passed while a slot is emptied"] += 1
                assert self._untouched, "I25: all adapters take newcomers on while the head of the queue lacks a slot"
        if self._num_passed >= MAX_OVERTAKEN and self._untouched is None:
            self._untouched = {*checked.scheduler._parts.adapters.resident}


def lacks_slot(checked: CheckedEngine, key: AdapterKey) -> bool:
    return bool(key) and not checked.scheduler._parts.adapters.has_room(key)


def waits_for_slot(checked: CheckedEngine, request: Request) -> bool:
    """Also if its adapter is the one whose slot is emptied."""
    return checked.scheduler._admission._turns.must_wait(request)
