"""One prompt's answers on their way: the engine's tokens in, text and figures out.

Text, stop strings and figures are the front end's; the engine's ways of ending a request become errors with its words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from cb_backend.contracts.errors import CbError, ErrorCode, InvalidRequestError, UnavailableError
from cb_backend.contracts.packed_logprobs import ChunkLogprobs, Delivered, TokenLogprob
from cb_backend.contracts.request import FinishReason
from cb_backend.front_end.text.logprobs import OutputLogprobs, PromptFigures
from cb_backend.front_end.text.output_text import OutputText
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.llm.prompts import Prepared
from cb_backend.llm.results import Chunk, CompletionOutput, RequestOutput, TokenFigures

_FINISH_NAME = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_NOT_COMPUTED = "the engine could not compute this prompt; the log says why"


class LiveAnswer:
    """One of a prompt's n answers, and the sink of its engine request."""

    def __init__(self, live: LivePrompt, request_id: int, index: int, tokenizer: Tokenizer) -> None:
        generate = live.prepared.generate
        self.request_id = request_id
        self.is_started = False  # the engine has its request
        self.is_ended = False
        self.live = live
        self._whole = live.output.outputs[index]
        self._text = OutputText(tokenizer, generate.params, live.prepared.token_ids)
        is_asking = generate.num_logprobs is not None
        self._logprobs = OutputLogprobs(tokenizer, generate.num_logprobs) if is_asking else None

    def on_scheduled(self, scheduled_at: float) -> None:
        """Nobody asks when."""

    def on_attached(self, attached: Sequence[Delivered]) -> None:
        for value in attached:
            if isinstance(value, ChunkLogprobs) and self.live.figures is not None:
                self.live.figures.push(value)

    def on_tokens(self, token_ids: tuple[int, ...], finish_reason: int, attached: Sequence[Delivered] = ()) -> None:
        if self.is_ended:
            return
        reason = FinishReason(finish_reason)
        self.on_attached(attached)
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            self.on_error(ErrorCode.INTERNAL, _NOT_COMPUTED)
            return
        delta = self._text.push(token_ids, reason)
        new = CompletionOutput(self._whole.index, delta.text, list(token_ids[: delta.num_tokens]))
        if self._logprobs is not None:
            figures = [value for value in attached if isinstance(value, TokenLogprob)]
            self._logprobs.push(new.token_ids, figures[: delta.num_tokens])
            new.logprobs = [_by_id(figure) for figure in json.loads(self._logprobs.take_json())]
            new.cumulative_logprob = self._logprobs.cumulative
        if delta.is_stopped or reason is not FinishReason.NONE:
            self.is_ended = True
            new.finish_reason = "stop" if delta.is_stopped else _FINISH_NAME[reason]
            new.stop_reason = self._text.stop_reason
        _extend(self._whole, new)
        self.live.take(self, new, has_to_cancel=delta.is_stopped and reason is FinishReason.NONE)

    def on_error(self, code: ErrorCode, message: str) -> None:
        self.live.fail(_error(code, message))


class LivePrompt:
    """What is owed to the caller for one prompt."""

    def __init__(
        self,
        index: int,
        prepared: Prepared,
        request_ids: Sequence[int],
        tokenizer: Tokenizer,
        cancel: Callable[[int], None],
        on_chunk: Callable[[Chunk], None],
    ) -> None:
        """`cancel` ends a request of the engine's; `on_chunk` gets what is new of an answer, text or end."""
        self.index = index
        self.prepared = prepared
        outputs = [CompletionOutput(number) for number in range(len(request_ids))]
        self.output = RequestOutput(prepared.prompt, prepared.token_ids, outputs)
        num_top = prepared.generate.params.prompt_logprobs
        self.figures = None if num_top is None else PromptFigures(tokenizer, prepared.token_ids, num_top)
        self.answers = [LiveAnswer(self, rid, number, tokenizer) for number, rid in enumerate(request_ids)]
        self.is_begun = False  # its first token is there, so the prompt is in the prefix cache for its other answers
        self._cancel = cancel
        self._on_chunk = on_chunk
        if prepared.generate.num_logprobs is not None:
            for output in outputs:
                output.logprobs, output.cumulative_logprob = [], 0.0

    @property
    def is_ended(self) -> bool:
        return self.output.error is not None or all(answer.is_ended for answer in self.answers)

    def take(self, answer: LiveAnswer, new: CompletionOutput, has_to_cancel: bool) -> None:
        """Note what is new of an answer."""
        if has_to_cancel:
            self._cancel(answer.request_id)
        chunk = Chunk(self.index, new)
        if not self.is_begun and self.figures is not None:
            figures = json.loads(self.figures.take_json())
            chunk.prompt_logprobs = [None if each is None else _by_id(each) for each in figures]
            self.output.prompt_logprobs = chunk.prompt_logprobs
        self.is_begun = True
        self._on_chunk(chunk)

    def fail(self, error: CbError) -> None:
        """End the prompt: one answer failed, the others go with it."""
        if not self.is_ended:
            self.output.error = error
            self.cancel()

    def cancel(self) -> None:
        for answer in self.answers:
            if not answer.is_ended:
                answer.is_ended = True
                self._cancel(answer.request_id)


def _extend(whole: CompletionOutput, new: CompletionOutput) -> None:
    whole.text += new.text
    whole.token_ids += new.token_ids
    whole.finish_reason, whole.stop_reason = new.finish_reason, new.stop_reason
    if new.logprobs is not None and whole.logprobs is not None:
        whole.logprobs += new.logprobs
        whole.cumulative_logprob = new.cumulative_logprob


def _by_id(figures: dict[str, dict[str, Any]]) -> TokenFigures:
    return {int(token_id): figure for token_id, figure in figures.items()}


def _error(code: ErrorCode, message: str) -> CbError:
    kinds = {ErrorCode.INVALID_ARG: InvalidRequestError, ErrorCode.UNAVAILABLE: UnavailableError}
    return kinds.get(code, CbError)(message)
