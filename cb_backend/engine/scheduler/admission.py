"""From the queue into a slot: who starts in this step, and who must wait.

The head of the queue starts first, with four exceptions inside the first `LOOKAHEAD` requests. The one that finds most
of its tokens in the prefix cache goes first, before they are evicted. While a giant prompt
is computed, or where one at the head does not fit into memory, short prompts may pass it. And a request whose prefix
another one is computing at this moment waits for it instead of computing it again; meanwhile anyone may pass. Nobody
is passed by a less urgent request, nobody more than `MAX_OVERTAKEN` times, and nobody after a preemption. What is
reserved for a high class is given to it past everybody else. This module does not know how a step's budget is divided.
"""

from __future__ import annotations

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request import Request, check_prompt_length
from cb_backend.engine.scheduler.admission_policy import AdmissionPolicy
from cb_backend.engine.scheduler.preemption import Preemption, is_protected
from cb_backend.engine.scheduler.prefill import SHORT_FACTOR, PrefillPlanner
from cb_backend.engine.scheduler.request_queue import RequestQueue
from cb_backend.engine.scheduler.slot_table import SlotTable
from cb_backend.engine.scheduler.step_plan import PlanBuilder
from cb_backend.engine.scheduler.step_result import StepResults
from cb_backend.engine.scheduler.swap_space import SwapSpace
from cb_backend.kv_cache.manager import MIN_COMING_BLOCKS, KVCacheManager

LOOKAHEAD = 8
MAX_OVERTAKEN = 16
_CAN_ALWAYS_TRY = -1
_ANY_LENGTH = 1 << 62


def check_fits_alone(request: Request, max_model_len: int, kv: KVCacheManager) -> None:
    """Raise `InvalidRequestError` for a request that could not run even if there were no other."""
    num_prompt, num_cache_tokens = request.num_prompt_tokens, kv.num_usable_blocks * kv.block_size
    check_prompt_length(min(num_prompt, len(request.token_ids)), max_model_len)
    if num_prompt + 1 > num_cache_tokens:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens, but the whole KV cache holds {num_cache_tokens} "
            f"({kv.num_usable_blocks} blocks of {kv.block_size}), one of which must be left for the "
            "output; shorten the prompt or give the cache more memory"
        )


class Admission:
    """Starts waiting requests, one a call."""

    def __init__(
        self,
        policy: AdmissionPolicy,
        is_chunking: bool,
        table: SlotTable,
        kv: KVCacheManager,
        results: StepResults,
        queue: RequestQueue,
        preemption: Preemption,
        prefill: PrefillPlanner,
        swap: SwapSpace,
    ) -> None:
        self._policy = policy
        self._is_chunking = is_chunking
        self._lookahead = LOOKAHEAD if is_chunking and policy.is_continuous else 1
        self._table = table
        self._kv = kv
        self._results = results
        self._queue = queue
        self._preemption = preemption
        self._prefill = prefill
        self._swap = swap
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
        if head is None or self._table.highest_priority <= head.scheduling.priority or not self._policy.is_continuous:
            return
        if self._is_prefix_coming(head):
            return
        num_cached = len(self._kv.get_computed_blocks(head)[0])
        num_blocks = self._kv.num_blocks_for(_num_tokens_to_hold(head)) - num_cached
        self._preemption.yield_to(head, num_blocks + self._policy.num_reserved_blocks(head))

    def admit(self, plan: PlanBuilder, giant_left: int = 0) -> bool:
        """Start one waiting request if slots, memory, budget and policy allow. False: nobody else can start now.

        `giant_left` above 0: only requests that are short beside a prompt with so many tokens left.
        """
        head = self._queue.head
        if head is None or not self._table.has_free_slot or (not giant_left and self._is_still_blocked(head)):
            return False
        longest = longest_of_all = giant_left // SHORT_FACTOR if giant_left else _ANY_LENGTH
        passed: list[Request] = []
        self._is_memory_short = False
        is_prefix_coming = False
        in_place = self._queue.first(self._lookahead)
        best = self._longest_hit(in_place)
        if best is not None and len(best.token_ids) <= longest and self._start(best, plan):
            for other in in_place[: in_place.index(best)]:
                other.num_overtaken += 1
            return True
        for request in self._candidates():
            if passed and not self._may_pass(request, passed):
                passed.append(request)  # it waits all the same: whoever starts after it passes it
                continue
            if passed and self._is_of_reserved_class(request, passed[0]):
                longest = longest_of_all  # it takes nothing that those before it could have
            num_tokens = len(request.token_ids)
            if num_tokens <= longest and self._is_prefix_coming(request):
                is_prefix_coming = True
            elif num_tokens <= longest:
                if self._start(request, plan):
                    for other in passed:
                        other.num_overtaken += not self._is_of_reserved_class(request, other)
                    return True
                longest = min(longest, num_tokens // SHORT_FACTOR)
            passed.append(request)
        if self._is_memory_short and not giant_left and not is_prefix_coming:
            self._blocked_head, self._blocked_at = head, self._kv.num_free_blocks
            self._blocked_version = self._table.version
        return False

    def _candidates(self) -> list[Request]:
        """The first of the queue, and the first of those who have a share of their own."""
        candidates = self._queue.first(self._lookahead)
        if self._policy.reserved_priority is not None:
            first = self._queue.first_within(self._policy.reserved_priority)
            if first is not None and first not in candidates:
                return [*candidates, first]
        return candidates

    def _longest_hit(self, in_place: list[Request]) -> Request | None:
        """The one with the most cached blocks, if it may pass those before it (of its tenant) and it is worth it."""
        if len(in_place) < 2 or not self._kv.enable_prefix_caching:
            return None
        hits = [self._kv.num_findable_blocks(request) for request in in_place]
        best = max(range(len(hits)), key=hits.__getitem__)  # of equals the first
        request, passed = in_place[best], in_place[:best]
        is_worth_it = hits[best] >= max(hits[:best], default=0) + MIN_COMING_BLOCKS
        is_same_turn = all(other.scheduling.tenant == request.scheduling.tenant for other in passed)
        return request if passed and is_worth_it and is_same_turn and self._may_pass(request, passed) else None

    def _is_of_reserved_class(self, request: Request, other: Request) -> bool:
        """Whether `request` has a share that `other` has no part in."""
        reserved = self._policy.reserved_priority
        return reserved is not None and request.scheduling.priority <= reserved < other.scheduling.priority

    def _may_pass(self, request: Request, passed: list[Request]) -> bool:
        return all(
            self._is_of_reserved_class(request, other)
            or (
                other.num_overtaken < MAX_OVERTAKEN
                and other.num_preemptions == 0
                and request.scheduling.priority <= other.scheduling.priority
            )
            for other in passed
        )

    def _start(self, request: Request, plan: PlanBuilder) -> bool:
        num_running = self._table.num_running
        if not self._policy.may_admit(request, self._queue, num_running):
            return False
        computed_blocks, num_computed = self._kv.get_computed_blocks(request)
        if not self._is_chunking and plan.num_rows and len(request.token_ids) - num_computed > plan.budget:
            return False
        num_tokens, num_reserved = _num_tokens_to_hold(request), self._policy.most_reserved_blocks(request)
        if self._kv.num_blocks_for(num_tokens) + num_reserved > self._kv.num_free_blocks:
            num_reserved = self._policy.num_reserved_blocks(request)
        if self._kv.allocate_slots(request, num_tokens, computed_blocks, num_reserved) is None:
            self._is_memory_short = True
            return False
        self._queue.start(request)
        self._results.charge(request, num_computed)
        if self._swap.num_tokens(request) > num_computed:
            num_computed = self._swap.num_tokens(request)
            plan.swap_in += self._swap.bring_in(request, len(computed_blocks))
        else:
            self._swap.forget(request)
        self._kv.announce(request)
        self._results.join(request, num_computed)
        plan.add_joined(request)
        self._prefill.add(plan, request.slot)
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
