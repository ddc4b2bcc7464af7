"""What requests ask to be done to the logits before sampling: biases, forbidden tokens and words, penalties.

In this order, for logits x of one row (the vLLM order):
1. allowed_token_ids: all others become -inf. 2. bad_words: the last token of a word becomes -inf where the tokens
before it end the text so far (prompt included). 3. logit_bias: x += bias. 4. repetition_penalty r, for tokens of
prompt or output: x / r where x > 0, else x * r. 5. frequency_penalty f and presence_penalty p, for output tokens:
x -= f * count + p.

All of it follows from the tokens known so far, which are kept on the device for the slots that ask: a step never waits
for the one before, and neither preemption nor a cached prefix changes anything. Rows without rules are not touched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.outputs import JoinedRow
from cb_backend.sampling_params import SamplingParams


class LogitsRules:
    """The rules of all slots that have any. Their rows are worked on one by one: they are meant to be few."""

    def __init__(self, vocab_size: int, max_model_len: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._device = device
        self._slots: dict[int, _SlotRules] = {}

    def join(self, rows: Sequence[JoinedRow]) -> None:
        """Take over the rules of requests that join a slot, and forget those of the slot before."""
        for row in rows:
            self._slots.pop(row.slot, None)
            if row.params.has_logits_rules:
                self._slots[row.slot] = _SlotRules(row, self._max_model_len, self._vocab_size, self._device)

    def find(self, slots: NDArray[np.int32], num_tokens: NDArray, is_sampling: NDArray[np.bool_]) -> RuledRows | None:
        """The rows of a step that have rules; None if there are none. Arrays [num_rows] in the order of the logits.

        num_tokens: tokens known to each row, sampled ones of launched steps included.
        """
        if not self._slots:
            return None
        found = [
            (row, self._slots[slot], int(num_tokens[row]))
            for row, slot in enumerate(slots.tolist())
            if slot in self._slots and is_sampling[row]
        ]
        return RuledRows(found) if found else None


class RuledRows:
    """The rows of one step that have rules."""

    def __init__(self, rows: list[tuple[int, _SlotRules, int]]) -> None:
        self._rows = rows  # (row, rules, number of tokens)

    def apply(self, logits: Tensor) -> Tensor:
        """Returns the logits [num_rows, vocab_size] as float32, in which a small bias is not rounded away."""
        logits = logits.float()  # exact, so other rows sample what they would have
        for row, rules, num_tokens in self._rows:
            rules.apply(logits[row], num_tokens)
        return logits

    def record(self, token_ids: Tensor) -> None:
        """Remember what was sampled. token_ids: int32 [num_rows]."""
        for row, rules, num_tokens in self._rows:
            rules.tokens[num_tokens] = token_ids[row]


class _SlotRules:
    """One request's rules as tensors, and its tokens."""

    def __init__(self, row: JoinedRow, max_model_len: int, vocab_size: int, device: torch.device) -> None:
        params = row.params
        max_tokens = min(row.num_prompt_tokens + params.max_tokens, max_model_len)
        self.tokens = torch.zeros(max_tokens + 1, dtype=torch.int64, device=device)
        known = torch.from_numpy(np.asarray(row.token_ids, np.int64))
        self.tokens[: len(known)] = known.to(device)
        self._num_prompt_tokens = row.num_prompt_tokens
        self._params = params
        self._is_forbidden: Tensor | None = None  # [vocab_size]
        if params.allowed_token_ids:
            self._is_forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self._is_forbidden[torch.tensor(params.allowed_token_ids, device=device)] = False
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
        self._bad_words = _bad_words(params, device)

    def apply(self, logits: Tensor, num_tokens: int) -> None:
        """Change one row's logits [vocab_size] fp32 in place."""
        params, tokens = self._params, self.tokens[:num_tokens]
        if self._is_forbidden is not None:
            logits.masked_fill_(self._is_forbidden, float("-inf"))
        for prefixes, lasts in self._bad_words:
            length = prefixes.shape[1]
            if num_tokens >= length:
                is_match = (tokens[num_tokens - length :] == prefixes).all(dim=1)
                # Added, because two words may end on one token and only one of them match.
                logits.index_add_(0, lasts, torch.where(is_match, float("-inf"), 0.0))
        if len(self._bias):
            logits.index_add_(0, self._bias_ids, self._bias)
        if params.repetition_penalty != 1.0:
            seen = logits[tokens]  # a token met twice is written twice, with the same value
            factor = params.repetition_penalty
            logits[tokens] = torch.where(seen > 0, seen / factor, seen * factor)
        if params.presence_penalty or params.frequency_penalty:
            output = tokens[self._num_prompt_tokens :]
            counts = torch.zeros_like(logits).index_add_(0, output, torch.ones_like(output, dtype=logits.dtype))
            logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def _bad_words(params: SamplingParams, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Words by length: (all tokens but the last [num_words, length - 1], the last [num_words])."""
    by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for word in params.bad_words_token_ids:
        by_length[len(word)].append(word)
    words = [torch.tensor(group, dtype=torch.int64, device=device) for group in by_length.values()]
    return [(group[:, :-1], group[:, -1].contiguous()) for group in words]
