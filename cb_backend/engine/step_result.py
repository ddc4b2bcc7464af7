"""What a step's result means: tokens recorded, full blocks cached, requests ended, the world told.

The half of the scheduler that looks back. It owns the running requests' coming and going (`join`, `leave`); it does
not know budgets, queues or plans to come.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cb_backend.engine.in_flight import InFlightSteps, LaunchedStep
from cb_backend.engine.slot_table import SlotTable
from cb_backend.kv_cache.manager import KVCacheManager
from cb_backend.outputs import NO_TOKEN, EngineOutput, ModelRunnerOutput
from cb_backend.request import FinishReason, Request, RequestStatus

_STATUS_OF_REASON = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}


@dataclass(slots=True)
class StepCounters:
    """Counts since the engine's start."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cancelled: int = 0


class StepResults:
    """Feeds results back into the slot table and the KV manager."""

    def __init__(self, table: SlotTable, kv: KVCacheManager, in_flight: InFlightSteps, counters: StepCounters) -> None:
        self.running: dict[int, Request] = {}  # by request id
        self._table = table
        self._kv = kv
        self._in_flight = in_flight
        self._counters = counters

    def join(self, request: Request, num_computed_tokens: int) -> None:
        """Give an admitted request its slot. `num_computed_tokens` were found in the prefix cache."""
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_computed_tokens
            self._counters.num_prompt_tokens += request.num_prompt_tokens
            self._counters.num_cached_prompt_tokens += num_computed_tokens
        self._table.join(request, num_computed_tokens)
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request

    def leave(self, slot: int, status: RequestStatus) -> Request:
        """Take a request out of the batch; its blocks are freed once no launched step touches them."""
        epoch = int(self._table.epoch[slot])
        request = self._table.leave(slot)
        request.status = status
        del self.running[request.request_id]
        self._in_flight.free_when_safe(self._kv.detach(request), slot, epoch)
        return request

    def complete(self, output: ModelRunnerOutput) -> EngineOutput:
        """Take in the result of the oldest launched step."""
        if output.step_id != self._in_flight.oldest_id():
            raise ValueError(f"result of step {output.step_id} came, step {self._in_flight.oldest_id()} is due")
        step = self._in_flight.take(output.step_id)
        if len(output.sampled_token_ids) != len(step.slots):
            raise ValueError(
                f"step {step.step_id} had {len(step.slots)} rows, its result has {len(output.sampled_token_ids)}"
            )
        failed = self._fail_rows(step, output.is_failed) if output.is_failed.any() else None
        slots, num_computed, is_sampling = step.slots, step.num_computed_after, step.is_sampling
        token_ids = output.sampled_token_ids
        has_prefill = step.num_decode_rows < len(slots)
        if step.table_version != self._table.version:
            is_live = self._table.epoch[slots] == step.epochs
            slots, num_computed, is_sampling = slots[is_live], num_computed[is_live], is_sampling[is_live]
            token_ids = token_ids[is_live]
        self._cache_full_blocks(slots, num_computed)
        if has_prefill:
            slots, num_computed, token_ids = slots[is_sampling], num_computed[is_sampling], token_ids[is_sampling]
        result = self._record_tokens(slots, num_computed, token_ids, has_prefill)
        self._in_flight.release()
        return _joined(failed, result) if failed is not None else result

    def fail(self, step_id: int) -> EngineOutput:
        """Every request of a launched step ends with ERROR. Raises `ValueError` if the step is not in flight."""
        step = self._in_flight.take(step_id)
        result = self._fail_rows(step, np.ones(len(step.slots), np.bool_))
        self._in_flight.release()
        return result

    def _fail_rows(self, step: LaunchedStep, is_failed: NDArray[np.bool_]) -> EngineOutput:
        slots = step.slots[is_failed & (self._table.epoch[step.slots] == step.epochs)]
        request_ids = self._table.request_ids[slots]
        for slot in slots.tolist():
            self._kv.withdraw(self._table.request_at(slot))
            self.leave(slot, RequestStatus.FINISHED_ERROR)
        reasons = np.full(len(slots), FinishReason.ERROR, np.uint8)
        return EngineOutput(request_ids, np.full(len(slots), NO_TOKEN, np.int32), reasons)

    def _cache_full_blocks(self, slots: NDArray[np.intp], num_computed: NDArray[np.int32]) -> None:
        if not self._kv.enable_prefix_caching:
            return
        table = self._table
        for row in table.take_full(slots, num_computed).tolist():
            slot = int(slots[row])
            self._kv.cache_full_blocks(table.request_at(slot), table.token_ids[slot], int(num_computed[row]))

    def _record_tokens(
        self,
        slots: NDArray[np.intp],
        num_computed: NDArray[np.int32],
        token_ids: NDArray[np.int32],
        has_prefill: bool,
    ) -> EngineOutput:
        table = self._table
        request_ids = table.request_ids[slots]
        reasons = table.record_sampled(slots, num_computed, token_ids)
        self._counters.num_output_tokens += len(slots)
        num_cached: dict[int, int] = {}
        if has_prefill:
            for slot in slots[num_computed == table.num_prompt_tokens[slots]].tolist():
                request = table.request_at(slot)
                num_cached[request.request_id] = request.num_cached_tokens
        if reasons.any():
            for row in np.flatnonzero(reasons).tolist():
                self.leave(int(slots[row]), _STATUS_OF_REASON[FinishReason(int(reasons[row]))])
        return EngineOutput(request_ids, token_ids.copy(), reasons, num_cached)


def _joined(first: EngineOutput, second: EngineOutput) -> EngineOutput:
    return EngineOutput(
        np.concatenate([first.request_ids, second.request_ids]),
        np.concatenate([first.token_ids, second.token_ids]),
        np.concatenate([first.finish_reasons, second.finish_reasons]),
        second.num_cached_tokens,
    )
