"""Structured output in a step: the masks of its rows put on their logits.

For a row's logits x, before every other rule: what the grammar does not allow becomes -inf. After every other rule: if
the grammar allows nothing more, the end-of-sequence token gets 0, so that it comes whatever min_tokens,
allowed_token_ids or bad_words say. Rows without a grammar are not touched. Where masks come from is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.contracts.step import NO_TOKEN, JoinedRow, MaskSource, TokenMasks
from cb_backend.engine.runner.device_state import copy_to
from cb_backend.layers.ops import Ops


class RowMasks:
    """Which slots have a grammar."""

    def __init__(self, num_slots: int, device: torch.device, ops: Ops) -> None:
        self._has_grammar = np.zeros(num_slots, np.bool_)
        self._device = device
        self._ops = ops

    def join(self, rows: Sequence[JoinedRow]) -> None:
        for row in rows:
            self._has_grammar[row.slot] = row.params.structured_output is not None

    def find(self, slots: NDArray[np.int32], positions: Sequence[int], source: MaskSource) -> MaskedRows | None:
        """The masks of those slots that have a grammar; None if there are none. Waits for the steps before.

        slots, positions [n]: of rows that sample, and of the tokens to be sampled.
        """
        (guided,) = self._has_grammar[slots].nonzero()
        if not len(guided):
            return None
        masks = source.masks(slots[guided], np.array(positions, np.int32)[guided])
        return None if masks is None else MaskedRows(masks, guided[masks.rows], self._device, self._ops)


class MaskedRows:
    """The masks of some rows of one step."""

    def __init__(self, masks: TokenMasks, rows: NDArray[np.intp], device: torch.device, ops: Ops) -> None:
        """`rows` [n]: where they stand among the logits that are to be masked."""
        self._masks = masks
        self._rows = rows
        self._device = device
        self._ops = ops

    def mask_logits(self, logits: Tensor) -> None:
        """Before all other rules, in place. logits [at least as many rows as were asked about, vocab_size]."""
        bits, rows = copy_to(self._masks.bits, self._device), copy_to(self._rows, self._device)
        self._ops.apply_token_bitmask(logits, bits, rows)

    def force_tokens(self, logits: Tensor) -> None:
        """After all other rules, in place: where one token must come, allow it."""
        (forced,) = (self._masks.forced != NO_TOKEN).nonzero()
        if len(forced):
            where = np.stack([self._rows[forced], self._masks.forced[forced]])
            rows, token_ids = copy_to(where, self._device)
            logits.index_put_((rows, token_ids), logits.new_zeros(len(forced)))
