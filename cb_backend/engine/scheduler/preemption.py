"""Who gives way when memory or slots are short: victims are chosen and put back into the queue here.

Two occasions. A running request needs a block and none is free: the last in the queue's order gives way. The first in
the queue has a lower `priority` value than running requests and does not fit beside them: the last of those gives way.
A request is preempted at most `MAX_PREEMPTIONS` times: after that it starts only with blocks for its full length, and
is not a victim any more. This module does not know budgets or plans.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.adapters import NO_ADAPTER
from cb_backend.contracts.request import Request, RequestStatus
from cb_backend.engine.scheduler.parts import Parts
from cb_backend.engine.scheduler.plan import DecodeBatch
from cb_backend.engine.scheduler.results import StepResults
from cb_backend.support.fault_points import reach

MAX_PREEMPTIONS = 4


def is_protected(request: Request) -> bool:
    """Whether the request has been preempted so often that it must not be again."""
    return request.num_preemptions >= MAX_PREEMPTIONS


class Preemption:
    """Takes slots and blocks from running requests. They are recomputed, or come back from host memory."""

    def __init__(self, parts: Parts, results: StepResults) -> None:
        self._table = parts.table
        self._kv = parts.kv
        self._in_flight = parts.in_flight
        self._results = results
        self._queue = parts.queue
        self._counters = parts.counters
        self._swap = parts.swap
        self._adapters = parts.adapters
        self._waiting: list[tuple[int, int]] = []  # (slot, epoch) of those without a block, in the order of their turn

    def make_room(self, growing: NDArray[np.intp], batch: DecodeBatch) -> NDArray[np.intp]:
        """Preempt until every other growing slot can have a block, now or once launched steps are back.

        Returns the slots that get a block now; victims and those who must wait leave the batch. Preempting comes
        before any row is planned, so no row has to be taken back; blocks on their way count, so that no victim is
        taken in vain. Nobody is left to take from only when protected requests hold the rest: then even the first of
        those that grow gives way, and comes back when they have ended.

        Who waits is served before who begins to grow later: so all wait only for the steps that are launched by now.
        """
        if len(growing) <= self._kv.num_free_rows:
            self._waiting = []
            return growing
        ending, others = self._ending_and_others()
        victims = [slot for slot in others if not is_protected(self._table.request_at(slot))]
        dropped = []
        while len(growing) * self._kv.num_groups > self._num_free_or_coming(ending):
            victim = victims.pop()
            self._preempt(victim)
            growing = growing[growing != victim]
            dropped.append(victim)
        epochs, num_free = self._table.epoch, self._kv.num_free_rows
        wanting = [(slot, int(epochs[slot])) for slot in growing.tolist()]
        still = [pair for pair in self._waiting if pair in wanting]
        in_turn = [*still, *(pair for pair in wanting if pair not in still)]
        self._waiting = in_turn[num_free:]
        batch.drop([*dropped, *(slot for slot, _ in self._waiting)])
        return np.array([slot for slot, _ in in_turn[:num_free]], np.intp)

    def yield_to(self, head: Request, num_blocks: int, lacks_adapter: bool) -> None:
        """Preempt running requests of higher `priority` values until the first of the queue has a slot and blocks.

        Where its adapter finds no slot, first all of another adapter, of the one with the fewest requests.

        Nobody is preempted for nothing: not if it would not suffice, not if requests about to end leave enough.
        A request with a higher value that has waited longer than `priority_aging_s` allows is no victim.
        """
        ending, others = self._ending_and_others()
        victims = self._users_of_one_adapter(head, others) if lacks_adapter else []
        if lacks_adapter and not victims:
            return
        is_enough = bool(self._table.num_free_slots or ending or victims)
        is_enough = is_enough and num_blocks <= self._num_free_or_coming([*ending, *victims])
        for slot in reversed(others):
            if is_enough:
                break
            if slot not in victims and self._is_less_urgent(slot, head):
                victims.append(slot)
                is_enough = num_blocks <= self._num_free_or_coming([*ending, *victims])
        for victim in victims if is_enough else ():
            self._preempt(victim)

    def start_over(self, request_id: int) -> None:
        """Have a running request computed again: nobody knows what its blocks hold. Nothing if it is not running.

        That uses up its first preemption at most: nobody has asked for its blocks.
        """
        request = self._table.by_id.get(request_id)
        if request is not None:
            self._results.leave(request.slot, RequestStatus.PREEMPTED)
            request.num_preemptions = max(request.num_preemptions, 1)  # its tenant has been charged for its start
            self._queue.put_back(request)

    def _users_of_one_adapter(self, head: Request, slots: list[int]) -> list[int]:
        """All running requests of the adapter that gives way: nobody, if there is none or a slot is coming anyway."""
        users: dict[int, list[int]] = {}
        for slot in slots:
            users.setdefault(self._table.request_at(slot).adapter_slot, []).append(slot)
        users.pop(NO_ADAPTER, None)
        if len(users) < self._adapters.num_slots:
            return []
        may_go = [each for each in users.values() if all(self._is_less_urgent(slot, head) for slot in each)]
        return min(reversed(may_go), key=len, default=[])[::-1]  # of equals the one that began last

    def _is_less_urgent(self, slot: int, head: Request) -> bool:
        """Whether the request that runs there may be preempted for this one."""
        request = self._table.request_at(slot)
        is_lower = request.scheduling.priority > head.scheduling.priority and request.queue_key > head.queue_key
        return is_lower and not is_protected(request)

    def _preempt(self, slot: int) -> None:
        reach("preemption.preempt")
        table = self._table
        num_known = int(table.num_known_tokens[slot])
        # Only what is known to be right: tokens before one that was sampled from them, and read.
        has_sampled = num_known > table.num_prefill_tokens[slot]
        block_table = table.request_at(slot).block_table
        request = self._results.leave(slot, RequestStatus.PREEMPTED)
        if has_sampled:
            blocks = self._kv.kept(block_table, num_known - 1)
            request.num_swaps += self._swap.put_out(request, blocks, num_known - 1)
        request.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._queue.put_back(request)

    def _ending_and_others(self) -> tuple[list[int], list[int]]:
        """Running slots in order: those whose last token has been sampled already, and the rest."""
        table = self._table
        is_ending = table.num_sure_tokens(table.order) >= table.max_computed_tokens[table.order]
        return table.order[is_ending].tolist(), table.order[~is_ending].tolist()

    def _num_free_or_coming(self, leaving: list[int]) -> int:
        """Blocks that are free once launched steps are back and the slots of `leaving` are given up."""
        tables = [self._table.request_at(slot).block_table for slot in leaving]
        return self._kv.num_free_blocks + self._in_flight.num_blocks_coming(self._kv.pool.ref_cnt, tables)
