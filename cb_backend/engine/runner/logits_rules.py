"""What requests ask to be done to the logits before sampling: biases, forbidden tokens and words, penalties.

In this order, for logits x of one row (the vLLM order):
1. allowed_token_ids: all others become -inf. 2. bad_words: the last token of a word becomes -inf where the tokens
before it end the text so far (prompt included). 3. logit_bias: x += bias. 4. repetition_penalty r, for tokens of
prompt or output: x / r where x > 0, else x * r. 5. frequency_penalty f and presence_penalty p, for output tokens:
x -= f * count + p. (-inf stays -inf, so 1 is done together with 4 and 5.) 6. min_tokens: stop ids become -inf; that
is the runner's own work, which needs `min_positions` for the rows that are sampled apart.

All of it follows from the tokens known so far, which are kept on the device for the slots that ask: a step never waits
for the one before, and neither preemption nor a cached prefix changes anything. Rows without rules are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.contracts.step import JoinedRow, RowStatus
from cb_backend.contracts.token_rules import MAX_LOGIT_BIASES, TokenRules
from cb_backend.engine.runner.bad_words import BadWords
from cb_backend.engine.runner.device_state import copy_to
from cb_backend.engine.runner.input_batch import is_sampled_apart, min_position
from cb_backend.kernels.row_sampling import RowSampling
from cb_backend.kernels.token_marks import FORBIDDEN, PROMPT
from cb_backend.layers.ops import Ops

NO_TOKEN_LEFT = (
    "no token is left that all of the request's rules allow (structured output, allowed_token_ids, bad_words,"
    " min_tokens); relax one of them"
)

_NO_MARKS = -1
_FIRST_MARK_ROWS = 4


class LogitsRules:
    """The rules of all slots that have any, as arrays on the device; changed when a request joins."""

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device, ops: Ops) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._ops = ops
        self.has_rules = np.zeros(num_slots, np.bool_)
        # Marks take a row of the vocabulary's size, so only slots that need them have one; all of one if all do.
        self._mark_row = np.full(num_slots, _NO_MARKS, np.int32)
        self._marks = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._penalties = torch.ones(num_slots, 3, dtype=torch.float32, device=device)  # by row of marks
        self._num_biases = np.zeros(num_slots, np.int32)
        self._bias_ids = torch.zeros(num_slots, MAX_LOGIT_BIASES, dtype=torch.int64, device=device)
        self._biases = torch.zeros(
            num_slots, MAX_LOGIT_BIASES, dtype=torch.float32, device=device
        )  # 0: changes nothing
        self._bad_words: dict[int, BadWords] = {}  # by slot
        self._min_tokens = np.zeros(num_slots, np.int32)
        self.min_positions = torch.zeros(num_slots, dtype=torch.int32, device=device)  # int32, as in `SlotState`
        self._last: RuledRows | None = None

    def join(self, rows: Sequence[JoinedRow]) -> None:
        """Take over the rules of requests that join a slot, and forget those of the slot before."""
        for row in rows:
            slot, params = row.slot, row.params
            if self.has_rules[slot]:
                self._forget(slot)
            if is_sampled_apart(params):
                self._last = None
                self.has_rules[slot] = True
                self._join(slot, row, params)

    def find(self, slots: NDArray[np.int32], rows: NDArray[np.intp], num_tokens: NDArray[np.int32]) -> RuledRows | None:
        """Those of the given rows that are sampled apart; None if there are none. Valid until the next call.

        slots, rows, num_tokens [n]: slot of each row that samples, its place among the logits, and how many tokens of
        it are known, sampled ones of launched steps included.
        """
        ruled = np.flatnonzero(self.has_rules[slots])
        if not len(ruled):
            return None
        slots, rows, num_tokens = slots[ruled], rows[ruled], num_tokens[ruled]
        if self._last is None or not self._last.is_same(slots, rows):
            self._last = self._ruled_rows(slots, rows)
        self._last.num_tokens = num_tokens.tolist()
        return self._last

    def apply(self, ruled: RuledRows, logits: Tensor) -> None:
        """Change logits [num_ruled_rows, vocab_size] fp32 in place."""
        for place, bad_words in ruled.bad_words:
            bad_words.apply(logits[place], ruled.num_tokens[place])
        if ruled.num_biases:
            ids = self._bias_ids[ruled.slots, : ruled.num_biases]
            logits.scatter_add_(1, ids, self._biases[ruled.slots, : ruled.num_biases])
        if len(ruled.mark_rows):
            self._ops.apply_marks(logits, ruled.marked, self._marks, ruled.mark_rows, self._penalties)

    def record(self, ruled: RuledRows, token_ids: Tensor) -> None:
        """Remember what was sampled. token_ids: int32 [num_ruled_rows]."""
        if len(ruled.mark_rows):
            self._marks[ruled.mark_rows, token_ids[ruled.marked].long()] += 1
        for place, bad_words in ruled.bad_words:
            bad_words.tokens[ruled.num_tokens[place]] = token_ids[place]

    # ---- joining -----------------------------------------------------------------------------------------------------

    def _forget(self, slot: int) -> None:
        self.has_rules[slot] = False
        self._mark_row[slot] = _NO_MARKS
        if self._num_biases[slot]:
            self._num_biases[slot] = 0
            self._biases[slot].zero_()
        self._bad_words.pop(slot, None)

    def _join(self, slot: int, row: JoinedRow, params: TokenRules) -> None:
        self._min_tokens[slot] = params.min_tokens
        self.min_positions[slot].fill_(min_position(row))  # also 0 more: it says where a stop id ends the row
        if params.bad_words_token_ids:
            self._bad_words[slot] = BadWords(
                params.bad_words_token_ids, row.token_ids, row.max_total_tokens, self._device
            )
        if params.logit_bias:
            self._num_biases[slot] = len(params.logit_bias)
            self._bias_ids[slot, : len(params.logit_bias)] = self._copy(list(params.logit_bias), np.int64)
            self._biases[slot, : len(params.logit_bias)] = self._copy(list(params.logit_bias.values()), np.float32)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if penalties != (1.0, 0.0, 0.0) or params.allowed_token_ids:
            mark_row = self._free_mark_row()
            self._mark_row[slot] = mark_row
            self._penalties[mark_row] = self._copy(penalties, np.float32)
            self._mark(self._marks[mark_row], row, params)

    def _mark(self, marks: Tensor, row: JoinedRow, params: TokenRules) -> None:
        """Fill one row of marks with what is known of a request."""
        known = self._copy(row.token_ids, np.int64)
        output = known[row.num_prompt_tokens :]
        marks.zero_()
        marks.index_fill_(0, known[: row.num_prompt_tokens], PROMPT)
        marks.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        if params.allowed_token_ids:
            allowed = self._copy(params.allowed_token_ids, np.int64)
            kept = marks[allowed]
            marks.fill_(FORBIDDEN)
            marks[allowed] = kept

    def _free_mark_row(self) -> int:
        """A row of marks that no slot has; more are made where all are taken."""
        taken = set(self._mark_row.tolist())
        num_rows = len(self._marks)
        for mark_row in range(num_rows):
            if mark_row not in taken:
                return mark_row
        num_more = min(max(num_rows, _FIRST_MARK_ROWS), len(self._mark_row) - num_rows)
        self._marks = torch.cat((self._marks, self._marks.new_zeros(num_more, self._vocab_size)))
        return num_rows

    def _ruled_rows(self, slots: NDArray[np.int32], rows: NDArray[np.intp]) -> RuledRows:
        mark_rows = self._mark_row[slots]
        marked = np.flatnonzero(mark_rows != _NO_MARKS)
        words = self._bad_words
        bad_words = [(place, words[slot]) for place, slot in enumerate(slots.tolist()) if slot in words]
        return RuledRows(
            host_slots=slots,
            host_rows=rows,
            num_tokens=[],
            slots=self._copy(slots, np.int64),
            rows=self._copy(rows, np.int64),
            marked=self._copy(marked, np.int64),
            mark_rows=self._copy(mark_rows[marked], np.int64),
            num_biases=int(self._num_biases[slots].max()),
            bad_words=bad_words,
            has_min_tokens=bool(self._min_tokens[slots].any()),
        )

    def _copy(self, values: object, dtype: type[np.generic]) -> Tensor:
        return copy_to(np.asarray(values, dtype), self._device)


def status_with_rules(status: Tensor, status_with_rules: Tensor) -> Tensor:
    """`RowStatus` of rows that were sampled again; arguments and result are int32 [num_ruled_rows].

    A row that failed before its rules were applied is not finite, even where they hide it; one that fails with them is
    ruled out.
    """
    ruled_out = torch.where(status_with_rules == RowStatus.NOT_FINITE, RowStatus.RULED_OUT, status_with_rules)
    return torch.where(status != RowStatus.OK, status, ruled_out)


@dataclass(slots=True, eq=False)
class RuledRows:
    """The rows of one step that have rules. Kept from step to step while they stay the same; only lengths change."""

    host_slots: NDArray[np.int32]
    host_rows: NDArray[np.intp]
    num_tokens: list[int]  # [n] known in this step
    slots: Tensor  # int64 [n]
    rows: Tensor  # int64 [n] their places among the step's logits
    marked: Tensor  # int64 [m] which of the n have marks
    mark_rows: Tensor  # int64 [m] and which row of the marks
    num_biases: int  # the most that one of them has
    bad_words: list[tuple[int, BadWords]]  # (which of the n, its words)
    has_min_tokens: bool
    sampling: RowSampling | None = None  # each [n]; for the runner to keep

    def is_same(self, slots: NDArray[np.int32], rows: NDArray[np.intp]) -> bool:
        return np.array_equal(slots, self.host_slots) and np.array_equal(rows, self.host_rows)
