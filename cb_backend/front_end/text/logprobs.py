"""A request's log-probabilities on their way to the client: summed, and written in vllm_backend's JSON.

Knows tokens and their figures, not how they are sent or computed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from cb_backend.contracts.packed_logprobs import ChunkLogprobs, TokenLogprob
from cb_backend.front_end.text.tokenizer import Tokenizer

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

        The chosen token comes first, with whatever figures the engine gives of it beside its rank; then the likeliest
        ones in order (the chosen one is not repeated).
        """
        if self._num_top is None:
            return NOT_ASKED_FOR
        unsent, self._unsent = self._unsent, []
        return json.dumps([_figures(self._tokenizer, *figures, self._num_top) for figures in unsent])


class PromptFigures:
    """The figures of one prompt's own tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], num_top: int) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._num_top = num_top
        self._chunks: list[ChunkLogprobs] = []

    def push(self, chunk: ChunkLogprobs) -> None:
        """Take what has come; quick. The engine may begin anew, after it had to give the request's memory away."""
        if chunk.first == 1:
            self._chunks.clear()
        self._chunks.append(chunk)

    def take_json(self) -> str:
        """A list with an entry a token as of `OutputLogprobs`; null for the first, which nothing comes before."""
        chunks, self._chunks = self._chunks, []
        figures = [logprob for chunk in chunks for logprob in chunk.unpack()]
        tokens = zip(self._prompt_ids[1:], figures, strict=True)
        return json.dumps([None, *(_figures(self._tokenizer, *both, self._num_top) for both in tokens)])


def _figures(tokenizer: Tokenizer, token_id: int, logprob: TokenLogprob, num_top: int) -> dict[str, dict[str, object]]:
    figures = {str(token_id): _figure(tokenizer, token_id, logprob.logprob, logprob.figures)}
    top = logprob.top_logprobs[:num_top]
    for top_id, value in zip(logprob.top_ids, top, strict=False):
        # Everything likelier stands before it in the list; equals share the rank of their first.
        figures.setdefault(str(top_id), _figure(tokenizer, top_id, value, {"rank": top.index(value) + 1}))
    return figures


def _figure(tokenizer: Tokenizer, token_id: int, value: float, others: dict[str, float]) -> dict[str, object]:
    return {"logprob": max(value, _LOWEST), **others, "decoded_token": tokenizer.token_text(token_id)}
