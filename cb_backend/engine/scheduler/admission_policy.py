"""Who may leave the queue: continuous batching, and the static batching it is measured against.

A policy looks at the queue and at memory, and says yes or no for the request at the head. It starts nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.request import Request
from cb_backend.engine.scheduler.output_lengths import most_growth
from cb_backend.engine.scheduler.slot_table import SlotTable
from cb_backend.engine.scheduler.step_result import StepResults
from cb_backend.kv_cache.manager import KVCacheManager

NO_RESERVE = -10.0  # of `admission_reserve`: nothing is kept for what running requests are going to need


class AdmissionPolicy(Protocol):
    is_continuous: bool  # whether anyone may start while others run
    reserved_priority: int | None  # greatest `priority` value of those for whom a share is reserved; None: nobody

    def may_admit(self, head: Request, waiting: Iterable[Request], num_running: int) -> bool:
        """Whether the request at the head of `waiting` may start now, memory aside."""
        ...

    def num_reserved_blocks(self, request: Request) -> int:
        """Blocks that must stay free when this request starts."""
        ...

    def most_reserved_blocks(self, request: Request) -> int:
        """No fewer than `num_reserved_blocks`, and found in a tenth of the time: often memory is not that short."""
        ...


class FcfsAdmission:
    """In-flight batching: whoever fits joins the running batch in the next step, in the queue's order."""

    is_continuous = True

    def __init__(self, table: SlotTable, results: StepResults, kv: KVCacheManager, config: EngineConfig) -> None:
        self._table = table
        self._results = results
        self._block_size = kv.block_size
        self._admission_reserve = config.admission_reserve
        self.reserved_priority = config.reserved_priority if config.reserved_share else None
        # Something is left for the others, however small the engine is.
        self._reserved_slots = min(int(config.reserved_share * table.num_slots), table.num_slots - 1)
        self._reserved_blocks = int(config.reserved_share * kv.num_usable_blocks)

    def may_admit(self, head: Request, waiting: Iterable[Request], num_running: int) -> bool:
        reserved = self.reserved_priority
        if reserved is None or head.scheduling.priority <= reserved:
            return True
        num_others = int(np.count_nonzero(self._table.priority[self._table.order] > reserved))
        return num_others < self._table.num_slots - self._reserved_slots

    def num_reserved_blocks(self, request: Request) -> int:
        """Room for every running request to cross one more block border, and for what all of them will grow.

        Growth is what is expected until most blocks are held (`output_lengths`), with `admission_reserve` standard
        deviations on top. Less urgent requests do not count: they would give way. For a request outside the reserved
        class also what that class does not hold of its share. Nothing is kept where nothing runs, so that no request
        waits for ever.
        """
        table, order = self._table, self._table.order
        if not len(order):
            return 0
        num_blocks = len(order) + self._growth_in_blocks(request)
        reserved = self.reserved_priority
        if reserved is None or request.scheduling.priority <= reserved:
            return num_blocks
        held = int(table.num_block_tokens[order[table.priority[order] <= reserved]].sum()) // self._block_size
        return max(num_blocks, self._reserved_blocks - held)

    def most_reserved_blocks(self, request: Request) -> int:
        """As if every request would run to its limit, and nobody in the reserved class held anything."""
        table, order = self._table, self._table.order
        if not len(order):
            return 0
        held = np.maximum(table.num_computed_tokens[order], table.num_prompt_tokens[order])
        growth = int((table.max_total_tokens[order] - held).sum()) + request.max_total_tokens - len(request.token_ids)
        return max(len(order) + growth // self._block_size, self._reserved_blocks)

    def _growth_in_blocks(self, request: Request) -> int:
        """What running requests and this one are to grow together, in whole blocks."""
        if self._admission_reserve <= NO_RESERVE:
            return 0
        table = self._table
        counted = table.order[table.priority[table.order] <= request.scheduling.priority]
        computed, prompt = table.num_computed_tokens[counted], table.num_prompt_tokens[counted]
        num_tokens = len(request.token_ids)
        held = np.append(np.maximum(computed, prompt), num_tokens).astype(np.float64)
        generated = np.append(np.maximum(computed - prompt, 0), num_tokens - request.num_prompt_tokens)
        allowed = np.append(table.max_total_tokens[counted], request.max_total_tokens) - held
        mean, deviation = self._results.output_lengths.still_to_come(generated)
        # Deviations of many requests cancel each other out.
        to_come = np.clip(mean + self._admission_reserve * deviation / len(held) ** 0.5, 0.0, allowed)
        return int(most_growth(held, to_come) / self._block_size)


class StaticAdmission:
    """Static batching: a batch is chosen when nothing runs, and nobody joins until all of it have ended.

    The batch takes as many requests as have slots and whose full lengths fit the cache together, as a server must
    that cannot preempt. It is kinder than most static servers: rows that have ended are not computed any more.
    """

    is_continuous = False
    reserved_priority: int | None = None

    def __init__(self, kv: KVCacheManager, max_num_seqs: int) -> None:
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._members: set[int] = set()  # request ids of the current batch

    def may_admit(self, head: Request, waiting: Iterable[Request], num_running: int) -> bool:
        if num_running == 0 and head.request_id not in self._members:
            self._members = self._choose(waiting)
        return head.request_id in self._members

    def num_reserved_blocks(self, request: Request) -> int:
        return 0

    def most_reserved_blocks(self, request: Request) -> int:
        return 0

    def _choose(self, waiting: Iterable[Request]) -> set[int]:
        members: set[int] = set()
        num_blocks_left = self._kv.num_usable_blocks
        for request in waiting:
            num_blocks_left -= self._kv.num_blocks_for(request.max_total_tokens)
            if num_blocks_left < 0 or len(members) == self._max_num_seqs:
                break
            members.add(request.request_id)
        return members
