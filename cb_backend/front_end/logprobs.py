"""A request's log-probabilities on their way to the client: summed, and written in vllm_backend's JSON.

Knows tokens and their figures, not how they are sent or computed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from cb_backend.front_end.tokenizer import Tokenizer
from cb_backend.messages import TokenLogprob

NOT_ASKED_FOR = "null"  # the output `logprobs` of a request without the parameter
_LOWEST = -9999.0  # JSON has no -Infinity


class OutputLogprobs:
    """The figures of one answer. `num_top` None keeps the sum only."""

    def __init__(self, tokenizer: Tokenizer, num_top: int | None) -> None:
        self.cumulative = 0.0  # of every token pushed so far
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._unsent: list[tuple[int, TokenLogprob]] = []

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Take the figures of the next tokens that count as output."""
        self.cumulative += sum(max(logprob.logprob, _LOWEST) for logprob in logprobs)
        if self._num_top is not None:
            self._unsent.extend(zip(token_ids, logprobs, strict=True))

    def take_json(self) -> str:
        """What is new since the last call: a list of {token id: {"logprob", "rank", "decoded_token"}}, a token each.

        The chosen token comes first, then the likeliest ones in order (the chosen one is not repeated).
        """
        if self._num_top is None:
            return NOT_ASKED_FOR
        unsent, self._unsent = self._unsent, []
        return json.dumps([self._figures(token_id, logprob, self._num_top) for token_id, logprob in unsent])

    def _figures(self, token_id: int, logprob: TokenLogprob, num_top: int) -> dict[str, dict[str, object]]:
        figures = {str(token_id): self._figure(token_id, logprob.logprob, logprob.rank)}
        top = logprob.top_logprobs[:num_top]
        for top_id, value in zip(logprob.top_ids, top, strict=False):
            # Everything likelier stands before it in the list; equals share the rank of their first.
            figures.setdefault(str(top_id), self._figure(top_id, value, top.index(value) + 1))
        return figures

    def _figure(self, token_id: int, value: float, rank: int) -> dict[str, object]:
        text = self._tokenizer.token_text(token_id)
        return {"logprob": max(value, _LOWEST), "rank": rank, "decoded_token": text}
