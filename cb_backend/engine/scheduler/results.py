"""What a step's result means: tokens recorded, full blocks cached, requests ended, the world told.

The half of the scheduler that looks back. It owns the running requests' coming and going (`join`, `leave`); it does
not know budgets, queues or plans to come.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.adapters import NO_ADAPTER
from cb_backend.contracts.request import FinishReason, Request, RequestStatus
from cb_backend.contracts.step import NO_TOKEN, ROW_OK, Attachment, EngineOutput, Failure, StepResult
from cb_backend.engine.scheduler.parts import Parts
from cb_backend.engine.scheduler.plan import LaunchedStep
from cb_backend.engine.scheduler.slots import Rows
from cb_backend.support.fault_points import reach

_STATUS_OF_REASON = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}


class StepResults:
    """Feeds results back into the slot table and the KV manager."""

    def __init__(self, parts: Parts) -> None:
        self._table = parts.table
        self._kv = parts.kv
        self._in_flight = parts.in_flight
        self._adapters = parts.adapters
        self._counters = parts.counters
        self._share = parts.share
        self._lengths = parts.lengths

    def join(self, request: Request, num_computed_tokens: int) -> None:
        """Give an admitted request its slot. `num_computed_tokens` were found in the prefix cache, or were kept.

        At its first start its tenant is charged: what is not cached of the prompt, and the expected output.
        """
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_computed_tokens
            self._counters.num_prompt_tokens += request.num_prompt_tokens
            self._counters.num_cached_prompt_tokens += num_computed_tokens
            expected = self._lengths.used_share * (request.max_total_tokens - request.num_prompt_tokens)
            self._share.start(request, request.num_prompt_tokens - num_computed_tokens + expected)
        self._table.join(request, num_computed_tokens)
        request.status = RequestStatus.RUNNING

    def settle(self, request: Request, has_started: bool) -> None:
        """A request has ended, running or waiting: charge its tenant what it cost. Recomputing is not the tenant's."""
        num_tokens = len(request.token_ids) - request.num_cached_tokens if has_started else 0
        self._share.end(request, num_tokens, has_started)

    def leave(self, slot: int, status: RequestStatus) -> Request:
        """Take a request out of the batch; what it holds is given back once no launched step touches it."""
        reach("results.leave")
        epoch = int(self._table.epoch[slot])
        request = self._table.leave(slot)
        request.status = status
        if status.is_finished:
            request.guide = None  # whoever still remembers the request
        block_ids = self._kv.detach(request)
        self._in_flight.free_when_safe(slot, epoch, partial(self._kv.free_blocks, block_ids), block_ids)
        if request.adapter_slot != NO_ADAPTER:
            give_back = partial(self._adapters.give_back, request.adapter_slot)
            self._in_flight.free_when_safe(slot, epoch, give_back, adapter_slot=request.adapter_slot)
            request.adapter_slot = NO_ADAPTER
        if status.is_finished:
            self.settle(request, has_started=True)
        return request

    def complete(self, output: StepResult) -> EngineOutput:
        """Take in the result of the oldest launched step."""
        if output.step_id != self._in_flight.oldest_id():
            raise ValueError(f"result of step {output.step_id} came, step {self._in_flight.oldest_id()} is due")
        reach("results.complete")
        step = self._in_flight.take(output.step_id)
        rows, num_rows = step.rows, len(step.rows.slots)
        if len(output.token_ids) != num_rows:
            raise ValueError(f"step {step.step_id} had {num_rows} rows, its result has {len(output.token_ids)}")
        failed = None
        if np.count_nonzero(output.status):
            failed = self._fail_rows(step, output.status != ROW_OK, output.attached)
        attached = _given(output.attached, rows, self._table.is_live(rows), failures=False) if output.attached else ()
        num_computed, token_ids = step.num_computed_after, output.token_ids[:, 0]
        has_prefill = step.num_decode_rows < num_rows
        keep = output.num_new != 0 if has_prefill else None
        is_live = None
        if step.table_version != self._table.version:
            is_live = self._table.is_live(rows)
            keep = is_live if keep is None else is_live & keep
        self._cache_filled(step, is_live)
        if keep is not None:
            rows, num_computed, token_ids = rows.take(keep), num_computed[keep], token_ids[keep]
        reasons = self._table.record_sampled(rows, num_computed, token_ids, step.may_end)
        num_cached = self._cached_tokens_to_tell(rows, num_computed) if has_prefill else {}
        self._counters.num_output_tokens += len(token_ids)
        self._end(rows, reasons)
        result = EngineOutput(rows.request_ids, token_ids.copy(), reasons, num_cached, attached)
        if step.pooled is not None:
            result = _joined(result, self._end_pooled(step))
        self._in_flight.release()
        return result if failed is None else _joined(failed, result)

    def _end_pooled(self, step: LaunchedStep) -> EngineOutput:
        """Pooling requests end with their prompts: they have no token, and what was read off is attached."""
        is_pooled = np.zeros(len(step.rows.slots), np.bool_)
        is_pooled[step.pooled] = True
        rows = step.rows.take(is_pooled & self._table.is_live(step.rows))  # those that failed have left
        num_cached = {}
        for slot in rows.slots.tolist():
            request = self.leave(slot, RequestStatus.FINISHED_STOPPED)
            num_cached[request.request_id] = request.num_cached_tokens
        num_ended = len(rows.slots)
        reasons = np.full(num_ended, FinishReason.STOP, np.uint8)
        return EngineOutput(rows.request_ids, np.full(num_ended, NO_TOKEN, np.int32), reasons, num_cached)

    def fail(self, step_id: int) -> EngineOutput:
        """Every request of a launched step ends with ERROR. Raises `ValueError` if the step is not in flight."""
        step = self._in_flight.take(step_id)
        result = self._fail_rows(step, np.ones(len(step.rows.slots), np.bool_))
        self._in_flight.release()
        return result

    def _fail_rows(
        self, step: LaunchedStep, is_failed: NDArray[np.bool_], attached: tuple[Attachment, ...] = ()
    ) -> EngineOutput:
        rows = step.rows
        ending = is_failed & self._table.is_live(rows)
        slots, request_ids = rows.slots[ending], rows.request_ids[ending]
        texts = _given(attached, rows, ending, failures=True)
        for slot in slots.tolist():
            self._kv.withdraw(self._table.request_at(slot))
            self.leave(slot, RequestStatus.FINISHED_ERROR)
        reasons = np.full(len(slots), FinishReason.ERROR, np.uint8)
        return EngineOutput(request_ids, np.full(len(slots), NO_TOKEN, np.int32), reasons, attached=texts)

    def _cache_filled(self, step: LaunchedStep, is_live: NDArray[np.bool_] | None) -> None:
        """Make the blocks that the step completed findable, and give back what has fallen out of windows.

        `is_live` None: all rows are."""
        if not self._kv.minds_full_blocks or not len(step.filled):
            return
        table = self._table
        filled = step.filled if is_live is None else step.filled[is_live[step.filled]]
        slots = step.rows.slots[filled]
        columns = table.requests_at(slots), slots.tolist(), step.num_computed_after[filled].tolist()
        for request, slot, computed in zip(*columns, strict=True):
            self._kv.cache_full_blocks(request, table.token_ids[slot], computed)

    def _cached_tokens_to_tell(self, rows: Rows, num_computed: NDArray[np.int32]) -> dict[int, int]:
        """request_id -> prompt tokens from the prefix cache, of requests whose first token has just come."""
        is_first = num_computed == self._table.num_prompt_tokens[rows.slots]
        requests = self._table.requests_at(rows.slots[is_first])
        return {request.request_id: request.num_cached_tokens for request in requests}

    def _end(self, rows: Rows, reasons: NDArray[np.uint8]) -> None:
        if np.count_nonzero(reasons):
            for row in np.flatnonzero(reasons).tolist():
                request = self.leave(int(rows.slots[row]), _STATUS_OF_REASON[FinishReason(int(reasons[row]))])
                num_prompt = request.num_prompt_tokens
                self._lengths.add(len(request.token_ids) - num_prompt, request.max_total_tokens - num_prompt)


def _given(
    attached: tuple[Attachment, ...], rows: Rows, keep: NDArray[np.bool_], failures: bool
) -> tuple[Attachment, ...]:
    """What is attached to the rows kept, by request id: failures, or all else. What nobody waits for is dropped."""
    return tuple(
        part.given_to(rows.request_ids[part.owners], keep[part.owners])
        for part in attached
        if isinstance(part, Failure) is failures and keep[part.owners].any()
    )


def _joined(first: EngineOutput, second: EngineOutput) -> EngineOutput:
    return EngineOutput(
        np.concatenate([first.request_ids, second.request_ids]),
        np.concatenate([first.token_ids, second.token_ids]),
        np.concatenate([first.finish_reasons, second.finish_reasons]),
        first.num_cached_tokens | second.num_cached_tokens,
        first.attached + second.attached,
    )
