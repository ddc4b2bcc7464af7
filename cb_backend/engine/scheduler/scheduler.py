"""Decides which tokens are computed in which step.

One idea: every request's `num_computed_tokens` catches up with its tokens, under a token budget; running requests
first, then waiting ones in the queue's order. Chunked prefill, prefix hits and preemption fall out of it. Up to
`run_ahead` further plans may be made before the result of an earlier one is fed back: lengths are known without the
values, and rows of a request that turns out to have ended are dropped by its slot's epoch.

This module does not know devices, tensors, text or processes. Plans go out, results come in; it never waits, and
what time it is it is told (`set_time`): without that, time stands still, and nobody ages or times out.
"""

from __future__ import annotations

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.config import MAX_RUN_AHEAD, EngineConfig
from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.messages import EngineStats
from cb_backend.contracts.queue_room import MUCH_ROOM, QueueRoom
from cb_backend.contracts.request import Request, RequestStatus, check_prompt_length
from cb_backend.contracts.step import EngineOutput, StepPlan, StepResult
from cb_backend.engine.scheduler.adapter_slots import AdapterSlots
from cb_backend.engine.scheduler.admission import Admission, ContinuousAdmission, PolicyKind
from cb_backend.engine.scheduler.fair_share import FairShare
from cb_backend.engine.scheduler.gate import Gate
from cb_backend.engine.scheduler.order import Deadlines, RequestQueue
from cb_backend.engine.scheduler.pace import Pace
from cb_backend.engine.scheduler.parts import Parts
from cb_backend.engine.scheduler.plan import DecodeBatch, InFlightSteps, PlanBuilder, launch
from cb_backend.engine.scheduler.preemption import Preemption
from cb_backend.engine.scheduler.prefill import PrefillPlanner
from cb_backend.engine.scheduler.results import StepResults
from cb_backend.engine.scheduler.slots import SlotTable
from cb_backend.kv_cache.grouped_manager import GroupedKVCacheManager
from cb_backend.kv_cache.manager import KVCacheManager
from cb_backend.kv_cache.swap_space import SwapSpace
from cb_backend.support.fault_points import reach


class Scheduler:
    """Owns every request between `add_request` and its end. Not thread-safe: one loop calls it."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        max_model_len: int,
        num_host_blocks: int = 0,
        policy: PolicyKind = ContinuousAdmission,
        num_adapter_slots: int = 0,
    ) -> None:
        """`policy`: who may start, where another than in-flight batching is to be studied."""
        self._budget = config.max_num_batched_tokens
        self._max_model_len, self._num_cache_tokens = max_model_len, kv.most_tokens
        share = FairShare()
        self._parts = parts = Parts(
            config=config,
            kv=kv,
            swap=SwapSpace(num_host_blocks),
            # Never more running requests than budget: then every running request can be given a token in every step.
            table=SlotTable(
                min(config.max_num_seqs, self._budget),
                min(max_model_len, self._num_cache_tokens),
                kv.block_size,
                kv.num_groups,
            ),
            queue=RequestQueue(config, share, is_fair=policy.is_continuous),
            share=share,
            # Where the config leaves the depth to the engine, the engine keeps to its own.
            in_flight=InFlightSteps(1 + (MAX_RUN_AHEAD if config.run_ahead is None else config.run_ahead)),
            adapters=AdapterSlots(num_adapter_slots),
        )
        self._kv, self._table, self._queue, self._swap = kv, parts.table, parts.queue, parts.swap
        self._in_flight, self._counters = parts.in_flight, parts.counters
        self._deadlines = Deadlines(config)
        self._pace = Pace(config.max_itl_ms)
        self.launched = self._pace.launch_ended  # the step planned last, now: to be told where there is a limit
        self._results = StepResults(parts)
        self._preemption = Preemption(parts, self._results)
        self._prefill = PrefillPlanner(parts, self._pace)
        self._admission = Admission(parts, policy, self._results, self._preemption, self._prefill.add)
        self.gate = Gate(parts, self._admission)
        self._decode_batch = DecodeBatch(self._table)
        self._now, self._step_id = 0.0, 0
        self._was_exclusive = False  # the last plan was prompts alone, and decode rows had to wait for it

    # ---- requests come and go ---------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return self._table.num_running

    @property
    def num_waiting(self) -> int:
        """Held ones included."""
        return self._queue.num_waiting

    @property
    def num_guided(self) -> int:
        """Running requests of structured output."""
        return self._table.num_guided

    def running(self, request_id: int) -> Request:
        """A request that has a slot. Raises `KeyError` for any other."""
        return self._table.by_id[request_id]

    @property
    def num_slots(self) -> int:
        """Most requests that can run at once."""
        return self._table.num_slots

    @property
    def longest_request(self) -> int:
        """Tokens of prompt and output that the whole cache can hold."""
        return self._num_cache_tokens

    @property
    def num_free_blocks(self) -> int:
        return self._kv.num_free_blocks

    @property
    def num_preemptions(self) -> int:
        return self._counters.num_preemptions

    def has_unfinished(self) -> bool:
        """Whether any request still has a token to come, or a launched step has not come back."""
        return self.num_waiting > 0 or self.num_running > 0 or len(self._in_flight) > 0

    def set_time(self, now: float) -> None:
        """Tell what time it is, in seconds from anywhere. It never goes back."""
        self._now = max(self._now, now)
        self._queue.now = self._now

    def add_request(self, request: Request, is_held: bool = False) -> None:
        """Queue a request. Raises `InvalidRequestError` if it can never run, `UnavailableError` if the queue is full.

        A held one waits until `release`, without a slot or blocks; it can be cancelled and can time out meanwhile.
        Lowers `request.max_total_tokens` to what the model and the whole KV cache can hold.
        """
        self._check_fits_alone(request)
        if request.request_id in self._table.by_id or request.request_id in self._queue:
            raise InvalidRequestError(f"request id {request.request_id} is in use; ids must be unique")
        request.max_total_tokens = min(request.max_total_tokens, self._max_model_len, self._num_cache_tokens)
        request.status = RequestStatus.WAITING
        self._queue.arrive(request, *self._free, is_held)
        try:
            reach("scheduler.add_request")
            self._deadlines.add(request)
        except BaseException:
            self._end(request.request_id)  # a refused request leaves nothing behind
            raise
        self._admission.try_again()

    def _check_fits_alone(self, request: Request) -> None:
        """Raise `InvalidRequestError` for a request that could not run even if there were no other."""
        num_prompt = request.num_prompt_tokens
        has_output = not request.is_pooling
        check_prompt_length(min(num_prompt, len(request.token_ids)), self._max_model_len, has_output=has_output)
        if num_prompt + has_output > self._num_cache_tokens:
            raise InvalidRequestError(
                f"the prompt has {num_prompt} tokens, but the whole KV cache holds {self._num_cache_tokens} "
                f"({self._kv.num_usable_blocks} blocks of {self._kv.block_size})"
                f"{', one of which must be left for the output' if has_output else ''}; shorten the prompt or give the "
                "cache more memory"
            )

    @property
    def _free(self) -> tuple[int, int]:
        """Slots, and tokens that free blocks can hold."""
        return self._table.num_free_slots, self._kv.num_free_tokens

    @property
    def queue_room(self) -> QueueRoom:
        """How many more requests would be taken now. Asked for several times a step."""
        return MUCH_ROOM if self._queue.has_much_room else self._queue.room(*self._free)

    def release(self, request_id: int) -> None:
        """A held request may start now, if it has not ended meanwhile."""
        self._queue.release(request_id)
        self._admission.try_again()

    def cancel(self, request_id: int) -> bool:
        """End a waiting or running request now; no output is owed for it. False if it is unknown or has ended."""
        reach("scheduler.cancel")
        if not self._end(request_id):
            return False
        self._counters.num_cancelled += 1
        return True

    def expire(self) -> list[tuple[int, str]]:
        """End the requests whose timeout has passed: their ids and what to tell. No other output is owed for them."""
        reach("scheduler.expire")
        expired = []
        for request, reason in self._deadlines.due(self._now):
            self._end(request.request_id)
            self._counters.num_timed_out += 1
            expired.append((request.request_id, reason))
        return expired

    def _end(self, request_id: int) -> bool:
        request = self._queue.remove(request_id)
        if request is not None:
            request.status = RequestStatus.FINISHED_ABORTED
            request.guide = None
            self._swap.forget(request)
            self._results.settle(request, has_started=request.num_preemptions > 0)
        elif request_id in self._table.by_id:
            self._results.leave(self._table.by_id[request_id].slot, RequestStatus.FINISHED_ABORTED)
        else:
            return False
        self._admission.try_again()
        return True

    def reset_prefix_cache(self) -> int:
        """Reuse nothing that was computed until now; returns how many blocks could have been found."""
        self._swap.forget_all()
        return self._kv.reset_prefix_cache()

    # ---- a step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute before a launched step has come back."""
        if self._in_flight.is_full:
            return None
        reach("scheduler.schedule")
        plan = PlanBuilder(self._budget)
        self._admission.yield_to_head()
        # Never twice running, so that nobody's next token waits for more than one such step.
        self._was_exclusive = not self._was_exclusive and self._plan_prompts_alone(plan)
        if not self._was_exclusive:
            can_admit = self._plan_decode_rows(plan)
            self._prefill.plan(plan, self._admission.admit if can_admit else None)
        if plan.num_rows == 0:
            return None
        if isinstance(self._kv, GroupedKVCacheManager):
            plan.take_promised(self._kv, self._table)
        self._step_id += 1
        plan.swap_out = self._swap.launch(self._step_id)
        if plan.adapter_loads:
            self._parts.adapters.launched(self._step_id, [slot for slot, _ in plan.adapter_loads])
        output, step = launch(self._step_id, plan, self._table)
        self._in_flight.launch(step)
        if self._pace.has_limit:
            self._pace.launched(output, self._now)
        return output

    def update_from_output(self, output: StepResult) -> EngineOutput:
        """Take in the result of the oldest launched step. Raises `ValueError` for any other step."""
        result = self._results.complete(output)
        if self._pace.has_limit:
            self._pace.completed(output.step_id, self._now)
        self._swap.came_back(output.step_id)
        self._parts.adapters.came_back(output.step_id)
        return result

    def fail_step(self, step_id: int) -> EngineOutput:
        """A launched step raised: every request in it ends with ERROR, and nothing it computed or copied is reused."""
        for request_id in self._swap.distrust(step_id):
            self._preemption.start_over(request_id)
        lost = self._parts.adapters.distrust(step_id)
        output = self._results.fail(step_id)
        for request_id in self._table.users_of_adapters(lost) if lost else ():
            self._preemption.start_over(request_id)
        return output

    def _plan_decode_rows(self, plan: PlanBuilder) -> bool:
        """Plan one token for every request past its prefill. False if blocks were short, so nobody may be admitted."""
        if not self._decode_batch.can_continue:
            self._decode_batch = DecodeBatch(self._table)
        batch = self._decode_batch
        has_enough = True
        if len(batch.out_of_room):
            growing = batch.slots[batch.out_of_room]
            has_enough = len(growing) <= self._kv.num_free_rows
            growing = self._preemption.make_room(growing, batch)
            plan.new_blocks = batch.grow(growing, self._kv)
        if len(batch.slots):
            plan.set_decode(batch)
        return has_enough

    def _plan_prompts_alone(self, plan: PlanBuilder) -> bool:
        """Where a prompt has no room beside the streams, or (hybrid) it is better; False: nothing was planned."""
        if self._prefill.has_no_room_beside_streams() and self._admission.admit(plan):
            return True
        if not self._prefill.is_better_without_streams():
            return False
        self._prefill.plan(plan, self._admission.admit)
        return plan.num_rows > 0

    # ---- looking in -------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        return self._parts.stats(self._step_id)

    def adapters_in_use(self) -> set[AdapterKey]:
        """All that plans may ask for from now on, if nobody arrives."""
        return self._parts.adapters_in_use()

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless blocks, slots and queue add up. For tests and idle moments; O(everything)."""
        self._parts.check_integrity()
