"""What was read off one text on its way to the client: a vector or figures. No text, no tokens, one response."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.packed_logprobs import ChunkLogprobs, PooledRow
from cb_backend.contracts.request import FinishReason
from cb_backend.front_end.text.pooled import finished
from cb_backend.front_end.wire.pooling_request import PoolingRequest
from cb_backend.serving.live_request import News


class PooledAnswer:
    """One text's result. See `live_request.Answer` for who may call what."""

    has_unsent = False

    def __init__(self, pooling: PoolingRequest, num_input_tokens: int | None = None) -> None:
        """`num_input_tokens`: of all texts of the request; only its first answer has them."""
        self.finish_reason = FinishReason.NONE
        self.num_unsent_tokens = 0
        self._pooling = pooling
        self._num_input_tokens = num_input_tokens
        self._values: NDArray[np.float32] | None = None

    def push(self, news: News) -> bool:
        self.finish_reason = news.finish_reason
        return False

    def on_prompt(self, value: ChunkLogprobs | PooledRow) -> None:
        if isinstance(value, PooledRow):
            self._values = value.values

    def tensors(self) -> dict[str, NDArray[Any]]:
        """`embedding` or `scores`, float32; in vllm_backend's form `text_output`."""
        if self._values is None:
            raise ValueError("the engine ended the request and gave no numbers")
        pooling = self._pooling
        numbers = finished(pooling, self._values)
        outputs: dict[str, NDArray[Any]] = {"embedding" if pooling.task == "embed" else "scores": numbers}
        if pooling.is_json:
            outputs = {"text_output": _text(json.dumps(numbers.tolist()))}
        if pooling.return_finish_reason:
            outputs["finish_reason"] = _text("stop")
        if pooling.return_num_input_tokens and self._num_input_tokens is not None:
            outputs["num_input_tokens"] = np.array([self._num_input_tokens], dtype=np.uint32)
        if pooling.return_num_output_tokens:
            outputs["num_output_tokens"] = np.zeros(1, np.uint32)
        return outputs


def _text(text: str) -> NDArray[Any]:
    return np.array([text.encode()], dtype=np.object_)
