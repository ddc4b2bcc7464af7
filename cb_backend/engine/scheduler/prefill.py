"""How a step's token budget is divided between prompts.

The first in order takes what it needs. Three things hold it back. A full step is planned to fit its graph
(`step_shapes`). Beside running streams, `max_itl_ms` bounds the prompt tokens of a step, and it may have to be a small
one, with few prompts, for large ones are slow to launch (`large_steps`). And while a giant prompt is
computed (one that a step cannot finish), prompts of at most a quarter of what it has left may go before it, in at most
half of the step: so short ones wait for each other and not for the giant, and the giant gets at least half.

The hybrid policy drains a queue of prompts faster than `max_itl_ms` alone would let it: while that is better by the
measured step times, every other step is one of prompts alone, as large as the budget, and running streams wait for it.
Better means: the share of its waiting that each request without a first token saves, summed over them, is more than the
share that each stream loses. When the prompts are done, steps are mixed again. Knows progress and budgets; not blocks,
and not who is in the queue: whoever starts is asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cb_backend.contracts.step import HIDDEN_WANTED, NOTHING_WANTED, TOKENS_WANTED
from cb_backend.engine.scheduler.pace import Pace
from cb_backend.engine.scheduler.parts import Parts
from cb_backend.engine.scheduler.plan import PlanBuilder
from cb_backend.engine.step_shapes import MOST_SMALL_PROMPTS, MOST_SMALL_TOKENS, FullSteps

SHORT_FACTOR = 4  # a short prompt is at most this part of what the giant has left
_SHARE_OF_SHORT = 2  # and the short ones together get this part of the step

# Starts the next request of the queue and plans its first chunk; False: nobody can start. The number: only one that is
# short beside a prompt with so many tokens left; 0: anybody.
Admit = Callable[[PlanBuilder, int], bool]


class PrefillPlanner:
    """Plans chunks of prompts whose requests have slots."""

    def __init__(self, parts: Parts, pace: Pace) -> None:
        config = parts.config
        self._table = parts.table
        self._queue = parts.queue
        self._is_chunking = config.enable_chunked_prefill
        self._pace = pace
        self._budget = config.max_num_batched_tokens
        self._full_steps = FullSteps(config.max_num_seqs, self._budget)
        self._is_hybrid = config.prefill_policy == "hybrid" and pace.has_limit

    def plan(self, plan: PlanBuilder, admit: Admit | None) -> None:
        """Give what is left of the budget to prompts: those that have begun, then those that `admit` starts.

        While a giant prompt is among them, short ones of both kinds come before it, in a share of the budget.
        """
        slots = [] if plan.num_rows == self._table.num_running else self._unfinished()
        if not len(self._queue):
            admit = None
        if not slots and admit is None:
            return
        if self._hold_back(plan, slots):
            del slots[MOST_SMALL_PROMPTS:]
            admit = None if admit is None else _for_small_step(admit)
        num_left = self._num_left(slots[0]) if slots and self._is_chunking else 0
        if num_left > plan.budget:  # a giant
            kept = plan.budget - plan.budget // _SHARE_OF_SHORT
            plan.budget -= kept
            short = [slot for slot in slots[1:] if self._num_left(slot) * SHORT_FACTOR <= num_left]
            num_before = len(plan.prefill)
            self._add_all(plan, sorted(short, key=self._num_left))
            planned = {row[0] for row in plan.prefill[num_before:]}
            slots = [slot for slot in slots if slot not in planned]
            self._admit_all(plan, admit, num_left)
            plan.budget += kept
        self._add_all(plan, slots)
        self._admit_all(plan, admit, 0)

    def has_no_room_beside_streams(self) -> bool:
        """Whether the first in the queue needs a step of its own: its prompt may not be cut, and does not fit beside a
        token for everybody who runs."""
        if self._is_chunking or not self._table.num_running:
            return False
        head = self._queue.head
        return head is not None and len(head.token_ids) > self._budget - self._table.num_running

    def is_better_without_streams(self) -> bool:
        """Whether the next step is to be one of prompts alone."""
        if not self._is_hybrid:
            return False
        table, order = self._table, self._table.order
        computed = table.num_computed_tokens[order]
        num_left = np.maximum(table.num_prefill_tokens[order] - computed, 0)
        is_stream = num_left == 0
        num_streams = int(np.count_nonzero(is_stream))
        num_prompts = len(self._queue) + len(order) - num_streams
        if not num_streams or not num_prompts:
            return False
        prompt_tokens = self._queue.num_tokens + int(num_left.sum())
        saved, lost = self._pace.shares_by_draining(
            num_streams, float(computed[is_stream].sum(dtype=np.float64)), min(prompt_tokens, self._budget)
        )
        return num_prompts * saved > num_streams * lost

    def add(self, plan: PlanBuilder, slot: int) -> None:
        """Plan the next chunk of a prompt: all that is left of it, or of the budget."""
        num_left = self._num_left(slot)
        num_scheduled = min(num_left, plan.budget) if self._is_chunking else num_left
        computed = int(self._table.num_computed_tokens[slot])
        wants = NOTHING_WANTED
        if num_scheduled == num_left:
            wants = HIDDEN_WANTED if self._table.request_at(slot).is_pooling else TOKENS_WANTED
        plan.add_prefill(slot, computed, num_scheduled, wants)

    def _add_all(self, plan: PlanBuilder, slots: list[int]) -> None:
        for slot in slots:
            if plan.budget == 0:
                return
            self.add(plan, slot)

    def _admit_all(self, plan: PlanBuilder, admit: Admit | None, giant_left: int) -> None:
        while admit is not None and plan.budget > 0 and admit(plan, giant_left):
            pass

    def _unfinished(self) -> list[int]:
        """Slots whose prompts are not complete, in order."""
        table, order = self._table, self._table.order
        return order[table.num_computed_tokens[order] < table.num_prefill_tokens[order]].tolist()

    def _num_left(self, slot: int) -> int:
        return int(self._table.num_prefill_tokens[slot] - self._table.num_computed_tokens[slot])

    def _hold_back(self, plan: PlanBuilder, slots: list[int]) -> bool:
        """Lower the budget to what a full step's graph holds, and so that running streams get their tokens in time.
        Returns whether the step is to be a small one, which has few prompts.

        Prompts that may not be cut are held to the budget alone: one that fits it, but not the graph, would wait for as
        long as there are streams.
        """
        if self._is_chunking:
            plan.budget = min(plan.budget, self._full_steps.most_prompt_tokens(plan.num_decode_rows))
        if not self._pace.has_limit:
            return False
        if plan.decode is None or not plan.num_decode_rows:
            is_small = self._pace.holds_up_last_tokens
        else:
            is_small = self._is_held_to_limit(plan, slots)
        if is_small:
            plan.budget = min(plan.budget, MOST_SMALL_TOKENS)
        return is_small

    def _is_held_to_limit(self, plan: PlanBuilder, slots: list[int]) -> bool:
        """Lower the budget by `max_itl_ms`. Returns whether the step is to be a small one."""
        assert plan.decode is not None
        position = int(self._table.num_computed_tokens[slots[0]]) if slots else 0
        num_pairs = float(np.sum(plan.decode.computed, dtype=np.float64))
        plan.budget = min(plan.budget, self._pace.most_prefill_tokens(plan.num_decode_rows, num_pairs, position))
        num_waiting = self._queue.num_tokens + sum(map(self._num_left, slots))
        return self._pace.must_be_small(plan.num_decode_rows, num_pairs, min(plan.budget, num_waiting))


def _for_small_step(admit: Admit) -> Admit:
    """Nobody starts in a step that has as many prompts as small ones have room for."""
    return lambda plan, giant_left: len(plan.prefill) < MOST_SMALL_PROMPTS and admit(plan, giant_left)
