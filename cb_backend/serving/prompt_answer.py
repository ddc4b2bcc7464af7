"""The answer to a request that asks about its prompt: there when the request is, so no engine is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.packed_logprobs import ChunkLogprobs, PooledRow
from cb_backend.contracts.request import FinishReason
from cb_backend.front_end.text.tokenized import TokenizedPrompt
from cb_backend.serving.live_request import LiveAnswer, LiveRequest, News


class PromptAnswer:
    """One response and no tokens. See `live_request.Answer`."""

    num_unsent_tokens = 0
    has_unsent = False

    def __init__(self, prompt: TokenizedPrompt) -> None:
        self.finish_reason = FinishReason.NONE
        self._prompt = prompt

    def push(self, news: News) -> bool:
        self.finish_reason = news.finish_reason
        return False

    def on_prompt(self, value: ChunkLogprobs | PooledRow) -> None:
        pass

    def tensors(self) -> dict[str, NDArray[Any]]:
        return {"text_output": _text(self._prompt.text), "tokenized": _text(self._prompt.about)}


def send_prompt(live: LiveRequest, prompt: TokenizedPrompt) -> None:
    """End the request with it. It is no request of the engine's, and in no figure of those."""
    answer = LiveAnswer(live, live.request_id, PromptAnswer(prompt))
    live.is_measured = False
    live.begin([answer], 0, is_stream=False, may_end_itself=False)
    live.take_tokens(answer, (), FinishReason.STOP, ())


def _text(text: str) -> NDArray[Any]:
    return np.array([text.encode(errors="replace")], dtype=np.object_)
