"""The model runner's memory of who is in the batch: one row of NumPy arrays a slot, changed only by what a plan brings.

What prompts and the rows that ask for more need, written once, when a request joins; a decode step reads none of it.
This module knows neither torch nor the scheduler.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.adapters import NO_ADAPTER
from cb_backend.contracts.step import JoinedRow, StepPlan
from cb_backend.contracts.token_rules import TokenRules


def is_sampled_apart(params: TokenRules) -> bool:
    """Whether a row's token is chosen after the step and not within it: its logits are changed first, or are wanted as
    the model gave them while stop ids are ruled out."""
    is_changed = params.has_logits_rules or params.structured_output is not None
    return is_changed or (params.logprobs is not None and params.min_tokens > 0)


def min_position(row: JoinedRow) -> int:
    """First position at which a stop id may come, and ends the request; within an int32 as in the scheduler's table."""
    return row.num_prompt_tokens + min(row.params.min_tokens, 2**30)


class InputBatch:
    """Slot-indexed host state. Row `slot` is valid from the plan in which a request joins it."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        self.max_rows = -(-max_model_len // block_size)  # of a block table
        self.block_size = block_size
        self.num_groups = num_groups
        # One more column than the model's length: the token sampled at the last position is recorded, never computed.
        self.token_ids = np.zeros((num_slots, max_model_len + 1), np.int32)
        self.block_tables = np.zeros((num_slots, self.max_rows * num_groups), np.int32)  # row after row
        self.num_prompt_tokens = np.zeros(num_slots, np.int32)
        self.adapters = np.full(num_slots, NO_ADAPTER, np.int32)  # slots of theirs
        self.num_logprobs = np.full(num_slots, -1, np.int32)  # likeliest tokens to report; -1 = none, 0 = the sampled
        self.num_prompt_logprobs = np.full(num_slots, -1, np.int32)  # the same for tokens of the prompt

    def apply(self, plan: StepPlan) -> None:
        """Take over what changed since the last plan."""
        for row in plan.joined:
            self.join(row)
        if len(plan.new_blocks):
            slots, indices, block_ids = plan.new_blocks.T
            self.block_tables[slots, indices] = block_ids

    def join(self, row: JoinedRow) -> None:
        """Take over a request that joins its slot."""
        slot, params = row.slot, row.params
        self.token_ids[slot, : len(row.token_ids)] = row.token_ids
        self.block_tables[slot, : len(row.block_ids)] = row.block_ids
        self.num_prompt_tokens[slot] = row.num_prompt_tokens
        self.adapters[slot] = row.adapter
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        # With the first output token, all of the prompt's were told: one that is computed again after it tells none.
        is_prompt_told = params.prompt_logprobs is None or len(row.token_ids) > row.num_prompt_tokens
        self.num_prompt_logprobs[slot] = -1 if is_prompt_told else params.prompt_logprobs

    def has_adapters(self, slots: NDArray[np.int32]) -> bool:
        """Whether a row of these slots goes through an adapter."""
        return bool((self.adapters[slots] != NO_ADAPTER).any())

    def slot_mapping(self, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Where each token's key and value go: block_id * block_size + offset. [num_tokens] each.

        [num_groups, num_tokens] of several groups.
        """
        rows = positions // self.block_size
        if self.num_groups > 1:
            rows = rows * self.num_groups + np.arange(self.num_groups)[:, None]
        block_ids = self.block_tables[slots, rows]
        return block_ids * np.int32(self.block_size) + positions % self.block_size
