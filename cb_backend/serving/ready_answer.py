"""An answer that is there when the request is, so that no engine generates it: about a prompt, or of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.packed_logprobs import ChunkLogprobs, PooledRow
from cb_backend.contracts.request import FinishReason
from cb_backend.serving.live_request import LiveAnswer, LiveRequest, News


class ReadyAnswer:
    """One response with these texts, by the names of their tensors, and no tokens. See `live_request.Answer`."""

    num_unsent_tokens = 0
    has_unsent = False

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.finish_reason = FinishReason.NONE
        self._texts = texts

    def push(self, news: News) -> bool:
        self.finish_reason = news.finish_reason
        return False

    def on_prompt(self, value: ChunkLogprobs | PooledRow) -> None:
        pass

    def tensors(self) -> dict[str, NDArray[Any]]:
        return {name: np.array([text.encode(errors="replace")], dtype=np.object_) for name, text in self._texts.items()}


def send_ready(live: LiveRequest, **texts: str) -> None:
    """End the request with these. It is no request of the engine's, and in no figure of those."""
    answer = LiveAnswer(live, live.request_id, ReadyAnswer(texts))
    live.is_measured = False
    live.begin([answer], 0, is_stream=False, may_end_itself=False)
    live.take_tokens(answer, (), FinishReason.STOP, ())
