"""Words that one request must not say, as token sequences, held against the text it has so far.

A word is ruled out by its last token: that becomes impossible where the tokens before it end the text (prompt
included). The text is kept on the device, so nothing waits for what a launched step sampled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.engine.runner.device_state import copy_to


class BadWords:
    """The words of one slot. Each is looked for by itself: few requests have any."""

    def __init__(
        self, words: Sequence[tuple[int, ...]], token_ids: NDArray[np.int32], max_tokens: int, device: torch.device
    ) -> None:
        """`token_ids` are those known at the join; `max_tokens` bounds prompt and output."""
        self.tokens = torch.zeros(max_tokens + 1, dtype=torch.int64, device=device)  # the owner records what is sampled
        self.tokens[: len(token_ids)] = copy_to(np.asarray(token_ids, np.int64), device)
        by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in words:
            by_length[len(word)].append(word)
        groups = [copy_to(np.asarray(group, np.int64), device) for group in by_length.values()]
        # (all tokens but the last [num_words, length - 1], the last [num_words])
        self._words = [(group[:, :-1], group[:, -1].contiguous()) for group in groups]

    def apply(self, logits: Tensor, num_tokens: int) -> None:
        """Rule out last tokens in logits [vocab_size] fp32 where `num_tokens` tokens are known."""
        for prefixes, lasts in self._words:
            length = prefixes.shape[1]
            if num_tokens >= length:
                is_match = (self.tokens[num_tokens - length : num_tokens] == prefixes).all(dim=1)
                # Added, because two words may end on one token and only one of them match.
                logits.index_add_(0, lasts, torch.where(is_match, float("-inf"), 0.0))
