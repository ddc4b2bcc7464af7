"""An answer as text: tokens in, outputs of one element out. Knows nothing of the server, of threads or of engines."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.packed_logprobs import ChunkLogprobs, PooledRow
from cb_backend.contracts.request import FinishReason
from cb_backend.front_end.text.logprobs import NOT_ASKED_FOR, OutputLogprobs, PromptFigures
from cb_backend.front_end.text.output_text import OutputText
from cb_backend.front_end.wire.protocol import GenerateRequest
from cb_backend.serving.live_request import News

FINISH_NAME = {FinishReason.NONE: "None", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class TextAnswer:
    """One of a request's n answers. See `live_request.Answer` for who may call what."""

    def __init__(
        self,
        generate: GenerateRequest,
        text: OutputText,
        logprobs: OutputLogprobs | None = None,
        num_input_tokens: int | None = None,
        prompt_figures: PromptFigures | None = None,
    ) -> None:
        """`num_input_tokens` and `prompt_figures` are the prompt's, so only the first answer has them."""
        self.finish_reason = FinishReason.NONE
        self.num_unsent_tokens = 0
        self._generate = generate
        self._text = text
        self._logprobs = logprobs
        self._num_input_tokens = num_input_tokens
        self._prompt_figures = prompt_figures  # until they are sent, with the first response
        self._unsent_text: list[str] = []
        self._unsent_ids: list[int] = []  # kept only where the client wants them

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent_text)

    def push(self, news: News) -> bool:
        delta = self._text.push(news.token_ids, news.finish_reason)
        self.num_unsent_tokens += delta.num_tokens
        if self._generate.return_output_ids:
            self._unsent_ids += news.token_ids[: delta.num_tokens]
        if delta.text:
            self._unsent_text.append(delta.text)
        if self._logprobs is not None:
            self._logprobs.push(news.token_ids[: delta.num_tokens], news.logprobs[: delta.num_tokens])
        if self.finish_reason is FinishReason.NONE:
            self.finish_reason = FinishReason.STOP if delta.is_stopped else news.finish_reason
        return delta.is_stopped

    def on_prompt(self, value: ChunkLogprobs | PooledRow) -> None:
        if self._prompt_figures is not None and isinstance(value, ChunkLogprobs):
            self._prompt_figures.push(value)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """`text_output` and what else was asked for: strings as object arrays of UTF-8."""
        generate = self._generate
        prefix = generate.text if generate.is_input_prepended else ""
        outputs: dict[str, NDArray[Any]] = {"text_output": _text(prefix + "".join(self._unsent_text))}
        if generate.return_finish_reason:
            outputs["finish_reason"] = _text(FINISH_NAME[self.finish_reason])
        if generate.return_cumulative_logprob:
            total = 0.0 if self._logprobs is None else self._logprobs.cumulative
            outputs["cumulative_logprob"] = np.array([total], dtype=np.float32)
        if generate.return_logprobs:
            outputs["logprobs"] = _text(NOT_ASKED_FOR if self._logprobs is None else self._logprobs.take_json())
        if self._prompt_figures is not None:
            outputs["prompt_logprobs"] = _text(self._prompt_figures.take_json())
            self._prompt_figures = None
        if generate.return_stop_reason:
            outputs["stop_reason"] = _text(json.dumps(self._text.stop_reason))
        if generate.return_output_ids:
            outputs["output_ids"] = np.array(self._unsent_ids, dtype=np.int32)
        if generate.return_num_input_tokens and self._num_input_tokens is not None:
            outputs["num_input_tokens"] = np.array([self._num_input_tokens], dtype=np.uint32)
        if generate.return_num_output_tokens:
            outputs["num_output_tokens"] = np.array([self.num_unsent_tokens], dtype=np.uint32)
        self._unsent_text.clear()
        self._unsent_ids = []
        self.num_unsent_tokens = 0
        return outputs


def _text(text: str) -> NDArray[Any]:
    return np.array([text.encode(errors="replace")], dtype=np.object_)
