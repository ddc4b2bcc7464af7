"""State of all running requests as NumPy arrays, so that a steady step costs a few array calls whatever the batch.

A slot is a request's place for as long as it runs; the model runner keeps its device state under the same numbers.
`order` lists the taken slots as their requests stood in the queue. This module does not know blocks, budgets or the
queue: it holds the figures and answers what a batch of sampled tokens means for each request.

NOTE: how many tokens a request has is not stored. A request past its prefill has `num_computed_tokens + 1` tokens,
the last of them perhaps sampled by a step whose result has not been read yet; before that it has
`num_prefill_tokens`. Only `num_known_tokens` values are in `token_ids`.

NOTE: `num_computed_tokens` is an upper bound: of a launched step's guesses the device may find `num_unsure` wrong. What
must be had in any case (blocks, places in a plan) is asked for the upper bound; whether a request has anything left to
do, and whether it is about to end, is a question for `num_sure_tokens`. Progress in a prompt is always exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.request import NO_SLOT, FinishReason, Request
from cb_backend.support.fault_points import reach

_NO_STOP_ID = -1
_NOBODY_RUNS = -(2**31)


class Rows(msgspec.Struct, frozen=True, eq=False):
    """What of some slots stays as it is for as long as their requests run. Arrays over the rows."""

    slots: NDArray[np.intp]
    epochs: NDArray[np.int32]
    request_ids: NDArray[np.int64]
    stop_ids: NDArray[np.int32]  # [num_rows, widest] padded with -1

    def take(self, mask: NDArray[np.bool_]) -> Rows:
        return Rows(self.slots[mask], self.epochs[mask], self.request_ids[mask], self.stop_ids[mask])


class SlotTable:
    """Arrays over `num_slots` slots. Change membership with `join` and `leave` only."""

    def __init__(self, num_slots: int, max_tokens: int, block_size: int, num_groups: int) -> None:
        """`max_tokens` bounds prompt + output of any request; so many blocks of a table hold `block_size` tokens."""
        self.block_size = block_size
        self._num_groups = num_groups
        self.requests: list[Request | None] = [None] * num_slots
        self.by_id: dict[int, Request] = {}  # the same
        self.order: NDArray[np.intp] = np.empty(0, np.intp)  # [num_running] taken slots, least queue_key first
        self.least_urgent = _NOBODY_RUNS  # greatest `priority` value of the running requests
        self.num_guided = 0  # running requests of structured output
        self.version = 0  # changes with every join and leave
        self._free_slots = list(range(num_slots - 1, -1, -1))

        def counts() -> NDArray[np.int32]:
            return np.zeros(num_slots, np.int32)

        # np.empty: pages of the token table are taken from the system only where tokens are written.
        self.token_ids = np.empty((num_slots, max_tokens), np.int32)
        self.epoch = counts()  # raised when the request leaves: results of its launched rows are dropped by it
        self.request_ids = np.zeros(num_slots, np.int64)
        self.priority = counts()
        self.num_prompt_tokens = counts()
        self.num_prefill_tokens = counts()  # tokens known at the join: prompt, and output from before a preemption
        self.num_computed_tokens = counts()  # launched steps included: the most that it can be
        self.num_unsure = counts()  # of these, how many may turn out not to be
        self.num_known_tokens = counts()  # values in token_ids: without what launched steps have sampled
        self.num_block_tokens = counts()  # tokens that the block table has room for
        # One less than the request may have, whose last token is never an input; of a pooling request all it has.
        self.max_computed_tokens = counts()
        self.min_total_tokens = counts()  # a stop id ends the request only at this length or beyond
        self.stop_ids = np.full((num_slots, 0), _NO_STOP_ID, np.int32)  # [num_slots, widest] padded with -1

    @property
    def num_running(self) -> int:
        return len(self.order)

    @property
    def num_slots(self) -> int:
        return len(self.requests)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def join(self, request: Request, num_computed_tokens: int) -> None:
        """Give the request a slot; its block table is complete for all its known tokens."""
        reach("slots.join")
        slot = self._free_slots.pop()
        num_tokens = len(request.token_ids)
        request.slot = slot
        self.requests[slot] = self.by_id[request.request_id] = request
        self.request_ids[slot] = request.request_id
        self.token_ids[slot, :num_tokens] = request.token_ids
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.priority[slot] = request.scheduling.priority
        self.num_prefill_tokens[slot] = num_tokens
        self.num_computed_tokens[slot] = num_computed_tokens
        self.num_unsure[slot] = 0
        self.num_known_tokens[slot] = num_tokens
        self.num_block_tokens[slot] = len(request.block_table) // self._num_groups * self.block_size
        self.max_computed_tokens[slot] = request.max_total_tokens - (not request.is_pooling)
        self.min_total_tokens[slot] = request.num_prompt_tokens + min(request.params.min_tokens, 2**30)
        self._set_stop_ids(slot, request.stop_token_ids)
        self.num_guided += request.guide is not None
        key = request.queue_key
        place = len(self.order)
        while place and self.request_at(int(self.order[place - 1])).queue_key > key:
            place -= 1
        self.order = np.concatenate([self.order[:place], [slot], self.order[place:]])
        self._note_change()

    def leave(self, slot: int) -> Request:
        """Take the slot back and return the request, its `token_ids` holding every token whose value was read."""
        request = self.request_at(slot)
        request.token_ids = self.token_ids[slot, : self.num_known_tokens[slot]].copy()
        request.slot = NO_SLOT
        self.requests[slot] = None
        del self.by_id[request.request_id]
        self.epoch[slot] += 1
        self.num_guided -= request.guide is not None
        self.order = self.order[self.order != slot]
        self._free_slots.append(slot)
        self._note_change()
        return request

    def _note_change(self) -> None:
        self.version += 1
        self.least_urgent = int(self.priority[self.order].max(initial=_NOBODY_RUNS))

    def request_at(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None
        return request

    def requests_at(self, slots: NDArray[np.intp]) -> list[Request]:
        found = [self.requests[slot] for slot in slots.tolist()]
        assert None not in found
        return cast("list[Request]", found)

    def users_of_adapters(self, adapter_slots: Sequence[int]) -> list[int]:
        """Ids of the running requests whose adapters are in these slots."""
        return [request_id for request_id, request in self.by_id.items() if request.adapter_slot in adapter_slots]

    def num_sure_tokens(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """The fewest tokens that can be computed once the launched steps are back: [num_slots asked]."""
        return self.num_computed_tokens[slots] - self.num_unsure[slots]

    def is_live(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows still have the request in their slot that they were planned for: [num_rows]."""
        return self.epoch[rows.slots] == rows.epochs

    def rows(self, slots: NDArray[np.intp]) -> Rows:
        return Rows(slots, self.epoch[slots], self.request_ids[slots], self.stop_ids[slots])

    def record_sampled(
        self, rows: Rows, num_tokens_before: NDArray[np.int32], token_ids: NDArray[np.int32], may_end: bool
    ) -> NDArray[np.uint8]:
        """Append one sampled token to each row; returns what that means for it, as `FinishReason` values [num_rows].

        `may_end` False promises that no row reaches its length limit.
        """
        slots, num_tokens = rows.slots, num_tokens_before + 1
        self.token_ids[slots, num_tokens_before] = token_ids
        self.num_known_tokens[slots] = num_tokens
        reasons = np.zeros(len(slots), np.uint8)
        if may_end:
            reasons[num_tokens > self.max_computed_tokens[slots]] = FinishReason.LENGTH
        is_stop = rows.stop_ids == token_ids[:, None]
        if np.count_nonzero(is_stop):  # a fifth of what `any` costs
            reasons[is_stop.any(1) & (num_tokens >= self.min_total_tokens[slots])] = FinishReason.STOP
        return reasons

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        narrow = self.stop_ids
        if len(stop_ids) > narrow.shape[1]:
            self.stop_ids = np.full((len(narrow), len(stop_ids)), _NO_STOP_ID, np.int32)
            self.stop_ids[:, : narrow.shape[1]] = narrow
        self.stop_ids[slot] = _NO_STOP_ID
        self.stop_ids[slot, : len(stop_ids)] = stop_ids

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless slots, order and figures agree."""
        order = self.order.tolist()
        taken = [slot for slot, request in enumerate(self.requests) if request is not None]
        assert sorted(order) == taken, "order and taken slots differ"
        assert sorted([*taken, *self._free_slots]) == list(range(len(self.requests))), "a slot is lost or free twice"
        requests = [self.request_at(slot) for slot in order]
        assert {request.request_id: request for request in requests} == self.by_id, "running sets differ"
        keys = [request.queue_key for request in requests]
        assert keys == sorted(keys), "the running requests are out of order"
        num_guided = sum(request.guide is not None for request in requests)
        assert self.num_guided == num_guided, "the count of guided requests is off"
        for slot, request in zip(order, requests, strict=True):
            computed, known = self.num_computed_tokens.item(slot), self.num_known_tokens.item(slot)
            unsure = self.num_unsure.item(slot)
            assert 0 <= unsure <= max(0, computed + 1 - known), f"slot {slot}: what is known is called unsure"
            prefill = self.num_prefill_tokens.item(slot)
            assert request.slot == slot, f"slot {slot} holds a request that thinks it is in {request.slot}"
            assert request.num_prompt_tokens <= prefill <= known <= request.max_total_tokens, f"slot {slot}: lengths"
            assert known <= max(prefill, computed + 1), f"slot {slot} knows a token that was never sampled"
            assert computed <= self.max_computed_tokens.item(slot), f"slot {slot} is computed past its limit"
            room = len(request.block_table) // self._num_groups * self.block_size
            assert computed <= room == self.num_block_tokens.item(slot), (
                f"slot {slot}: computed {computed}, room {room}"
            )
