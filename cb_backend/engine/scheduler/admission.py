"""From the queue into a slot: who starts in this step, and who must wait.

The head of the queue starts first, with five exceptions inside the first `LOOKAHEAD` requests (and none against what
`order` allows). The one that finds most of its tokens in the prefix cache goes first, before they are evicted. While a
giant prompt is computed, or where one at the head does not fit into memory, short prompts may pass it. A request whose
prefix another one is computing at this moment waits for it instead of computing it again, and one whose adapter finds
no slot waits for one (`adapter_turns`); meanwhile anyone may pass. What is reserved for a high class is given to it
past everybody else. Whoever is chosen starts only if the policy agrees, and leaves as many blocks free as it wants.
This module does not know how a step's budget is divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from cb_backend.contracts.request import Request
from cb_backend.engine.scheduler.adapter_turns import AdapterTurns
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN
from cb_backend.engine.scheduler.parts import Parts
from cb_backend.engine.scheduler.plan import PlanBuilder
from cb_backend.engine.scheduler.preemption import Preemption, is_protected
from cb_backend.engine.scheduler.prefill import SHORT_FACTOR
from cb_backend.engine.scheduler.results import StepResults
from cb_backend.engine.scheduler.stats import most_growth
from cb_backend.kv_cache.manager import MIN_COMING_BLOCKS

LOOKAHEAD = 8
NO_RESERVE = -10.0  # of `admission_reserve`: nothing is kept for what running requests are going to need
_CAN_ALWAYS_TRY = -1
_ANY_LENGTH = 1 << 62


class AdmissionPolicy(Protocol):
    """Looks at the queue and at memory, and says who may leave the queue. It starts nothing itself."""

    def may_admit(self, head: Request) -> bool:
        """Whether this request, whose turn it is, may start now, memory aside."""
        ...

    def num_reserved_blocks(self, request: Request) -> int:
        """Blocks that must stay free when this request starts."""
        ...

    def most_reserved_blocks(self, request: Request) -> int:
        """No fewer than `num_reserved_blocks`, and found in a tenth of the time: often memory is not that short."""
        ...


class PolicyKind(Protocol):
    """Makes an `AdmissionPolicy`. A policy's class is one."""

    is_continuous: bool  # whether anyone may start while others run

    def __call__(self, parts: Parts) -> AdmissionPolicy: ...


class ContinuousAdmission:
    """In-flight batching: whoever fits joins the running batch in the next step, in the queue's order."""

    is_continuous = True

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        self._table = parts.table
        self._lengths = parts.lengths
        self._kv = parts.kv
        self._block_size = parts.kv.block_size
        self._admission_reserve = config.admission_reserve
        self._reserved_priority = parts.queue.reserved_priority
        # The share is below 1, so one slot at least is left for the others, however small the engine is.
        self._reserved_slots = int(config.reserved_share * self._table.num_slots)
        self._reserved_blocks = int(config.reserved_share * parts.kv.num_usable_blocks)

    def may_admit(self, head: Request) -> bool:
        reserved = self._reserved_priority
        if reserved is None or head.scheduling.priority <= reserved:
            return True
        num_others = int(np.count_nonzero(self._table.priority[self._table.order] > reserved))
        return num_others < self._table.num_slots - self._reserved_slots

    def num_reserved_blocks(self, request: Request) -> int:
        """Room for every running request to cross one more block border, and for what all of them will grow.

        Growth is what is expected until most blocks are held (`stats`), with `admission_reserve` standard deviations on
        top. Less urgent requests do not count: they would give way. For a request outside the reserved class also what
        that class does not hold of its share. Nothing is kept where nothing runs, so that no request waits for ever.
        """
        table, order = self._table, self._table.order
        if not len(order):
            return 0
        num_blocks = len(order) * self._kv.num_groups + self._growth_in_blocks(request)
        reserved = self._reserved_priority
        if reserved is None or request.scheduling.priority <= reserved:
            return num_blocks
        counted = table.num_block_tokens[order[table.priority[order] <= reserved]]
        return max(num_blocks, self._reserved_blocks - self._kv.num_blocks_held(counted))

    def most_reserved_blocks(self, request: Request) -> int:
        """As if every request would run to its limit, and nobody in the reserved class held anything."""
        table, order = self._table, self._table.order
        if not len(order):
            return 0  # as `num_reserved_blocks` has it
        held = np.maximum(table.num_computed_tokens[order], table.num_prompt_tokens[order])
        growth = int((table.max_computed_tokens[order] + 1 - held).sum())
        growth += request.max_total_tokens - len(request.token_ids)
        return max((len(order) + growth // self._block_size) * self._kv.num_groups, self._reserved_blocks)

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
        allowed = np.append(table.max_computed_tokens[counted] + 1, request.max_total_tokens) - held
        mean, deviation = self._lengths.still_to_come(generated)
        # Deviations of many requests cancel each other out.
        to_come = np.clip(mean + self._admission_reserve * deviation / len(held) ** 0.5, 0.0, allowed)
        return self._kv.growth(held, to_come, most_growth(held, to_come))


class Admission:
    """Starts waiting requests, one a call."""

    def __init__(
        self,
        parts: Parts,
        kind: PolicyKind,
        results: StepResults,
        preemption: Preemption,
        add_chunk: Callable[[PlanBuilder, int], None],
    ) -> None:
        """`add_chunk` plans the first chunk of the prompt in a slot."""
        self._policy = kind(parts)
        self._is_continuous = kind.is_continuous
        self._is_chunking = parts.config.enable_chunked_prefill
        self._lookahead = LOOKAHEAD if self._is_chunking and self._is_continuous else 1
        self._table = parts.table
        self._kv = parts.kv
        self._queue = parts.queue
        self._swap = parts.swap
        self._adapters = parts.adapters
        self._turns = AdapterTurns(parts.adapters, parts.table, parts.queue)
        self._results = results
        self._preemption = preemption
        self._add_chunk = add_chunk
        self.is_closed = False  # to everybody who has not begun
        self._is_memory_short = False  # of the last look at the queue: somebody did not fit
        self._blocked_head: Request | None = None  # the head of the queue when last nobody could start ...
        self._blocked_at = _CAN_ALWAYS_TRY  # ... the free blocks at that time
        self._blocked_version = 0  # ... and the slot table's version

    def try_again(self) -> None:
        """The queue has changed otherwise than by a start."""
        self._blocked_at = _CAN_ALWAYS_TRY

    def yield_to_head(self) -> None:
        """Let the first of the queue preempt what is less urgent. Costs nothing where all priorities are equal."""
        head = self._queue.head
        if head is None or self._table.least_urgent <= head.scheduling.priority or not self._is_continuous:
            return
        if self._is_prefix_coming(head) or self.is_closed:
            return
        num_blocks = self._kv.num_missing_blocks(head, _num_tokens_to_hold(head))
        num_blocks += self._policy.num_reserved_blocks(head)
        self._preemption.yield_to(head, num_blocks, self._turns.lacks(head))

    def admit(self, plan: PlanBuilder, giant_left: int = 0) -> bool:
        """Start one waiting request if slots, memory, budget and policy allow. False: nobody else can start now.

        `giant_left` above 0: only requests that are short beside a prompt with so many tokens left.
        """
        queue, head = self._queue, self._queue.head
        if head is None or not self._table.num_free_slots:
            return False
        longest = longest_of_all = giant_left // SHORT_FACTOR if giant_left else _ANY_LENGTH
        if self.is_closed:
            return self._go_on(plan, longest)
        if not giant_left and self._is_still_blocked(head):
            return False
        self._is_memory_short = False
        must_wait = False  # somebody, for something that comes without any further decision
        first, candidates = queue.first(self._lookahead), queue.candidates(self._lookahead)
        if self._adapters.num_slots:
            self._turns.look(candidates)
        best = self._longest_hit(first)
        if best is not None and len(best.token_ids) <= longest and self._start(best, plan):
            for other in first[: first.index(best)]:
                other.num_overtaken += 1
            return True
        passed: list[Request] = []  # they want what those after them could take
        waiting: list[Request] = []  # for a slot of their adapter: whoever takes none may pass, unless less urgent
        for request in self._with_first_of_adapters(candidates):
            if self._turns.must_wait(request):
                waiting.append(request)
                continue
            if not (queue.may_pass(request, passed) and self._turns.may_pass(request, waiting)):
                passed.append(request)  # it waits all the same: whoever starts after it passes it
                continue
            if passed and queue.has_share_apart(request, passed[0]):
                longest = longest_of_all  # it takes nothing that those before it could have
            num_tokens = len(request.token_ids)
            if num_tokens <= longest and self._is_prefix_coming(request):
                must_wait = True
            elif num_tokens <= longest:
                if self._start(request, plan):
                    for other in (*passed, *waiting):
                        other.num_overtaken += not queue.has_share_apart(request, other)
                    return True
                longest = min(longest, num_tokens // SHORT_FACTOR)
            passed.append(request)
        if self._is_memory_short and not (giant_left or must_wait or waiting):
            self._blocked_head, self._blocked_at = head, self._kv.num_free_blocks
            self._blocked_version = self._table.version
        return False

    def _go_on(self, plan: PlanBuilder, longest: int) -> bool:
        """Start one of those who have begun. Nobody else counts: whoever may not begin must keep none of them waiting,
        for that is what everybody waits for."""
        begun = (request for request in self._queue.everyone if request.num_preemptions)
        return any(len(request.token_ids) <= longest and self._start(request, plan) for request in begun)

    def _with_first_of_adapters(self, candidates: list[Request]) -> list[Request]:
        """Where one of them lacks an adapter, also the first of each adapter that can start, however far behind: many
        requests of one adapter must not keep all others waiting.
        """
        if self._adapters.num_slots and self._lookahead > 1 and any(map(self._turns.lacks, candidates)):
            more = self._queue.first_of_adapters(self._turns.takes_on)
            return [*candidates, *(request for request in more if request not in candidates)]
        return candidates

    def _longest_hit(self, first: list[Request]) -> Request | None:
        """The one with the most cached blocks, if it may pass those before it (of its tenant) and it is worth it."""
        kv = self._kv
        if not kv.enable_prefix_caching or not any(kv.has_findable_blocks(r, MIN_COMING_BLOCKS) for r in first[1:]):
            return None
        hits = [kv.num_findable_blocks(request) for request in first]
        best = max(range(len(hits)), key=hits.__getitem__)  # of equals the first
        request, passed = first[best], first[:best]
        is_worth_it = hits[best] >= max(hits[:best], default=0) + MIN_COMING_BLOCKS
        is_same_turn = all(other.scheduling.tenant == request.scheduling.tenant for other in passed)
        if not passed or not is_worth_it or not is_same_turn or self._turns.must_wait(request):
            return None
        waiting = [other for other in passed if self._turns.must_wait(other)]
        others = [other for other in passed if other not in waiting]
        return request if self._queue.may_pass(request, others) and self._turns.may_pass(request, waiting) else None

    def _start(self, request: Request, plan: PlanBuilder) -> bool:
        if not self._policy.may_admit(request) or self._turns.lacks(request):
            return False
        computed_blocks, num_computed = self._kv.get_computed_blocks(request)
        if not self._is_chunking and plan.num_rows and len(request.token_ids) - num_computed > plan.budget:
            return False
        num_tokens, num_reserved = _num_tokens_to_hold(request), self._policy.most_reserved_blocks(request)
        if self._kv.num_blocks_for(num_tokens) + num_reserved > self._kv.num_free_blocks:
            num_reserved = self._policy.num_reserved_blocks(request)
        num_swapped = self._swap.num_tokens(request)
        if self._kv.allocate_slots(request, num_tokens, computed_blocks, num_reserved, num_swapped) is None:
            self._is_memory_short = True
            return False
        self._queue.start(request)
        if num_swapped > num_computed:
            num_computed = num_swapped
            plan.swap_in += self._swap.bring_in(request, computed_blocks)
        else:
            self._swap.forget(request)
        self._kv.announce(request)
        if request.adapter:
            request.adapter_slot, must_load = self._adapters.take(request.adapter)
            if must_load:
                plan.adapter_loads.append((request.adapter_slot, request.adapter))
            self._turns.joined(request)
        self._results.join(request, num_computed)
        plan.add_joined(request)
        self._add_chunk(plan, request.slot)
        return True

    def _is_prefix_coming(self, request: Request) -> bool:
        """Whether to wait for a prefix that is being computed; not if the request has been passed or preempted."""
        if self._lookahead == 1 or request.num_overtaken >= MAX_OVERTAKEN or request.num_preemptions:
            return False
        return self._kv.is_prefix_coming(request)

    def _is_still_blocked(self, head: Request) -> bool:
        """Whether nothing has changed for the better since nobody could start."""
        is_same = head is self._blocked_head and self._blocked_version == self._table.version
        return is_same and self._table.num_running > 0 and self._kv.num_free_blocks <= self._blocked_at


def _num_tokens_to_hold(request: Request) -> int:
    """Tokens for which a request needs blocks at its start: those it has, or all it may ever have."""
    return request.max_total_tokens if is_protected(request) else len(request.token_ids)
