"""One request from `execute` to its final response, and the answers that it is to bring.

Other threads leave news here (tokens, an end, an error) and queue the request for its sender thread; only that thread
reads the news, detokenises and sends. What is sent, and how, is the responder's business.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cb_backend.errors import ErrorCode
from cb_backend.front_end.text.logprobs import NOT_ASKED_FOR, OutputLogprobs, PromptFigures
from cb_backend.front_end.text.output_text import OutputText, TextDelta
from cb_backend.front_end.wire.protocol import GenerateRequest
from cb_backend.packed_logprobs import ChunkLogprobs, Delivered, TokenLogprob
from cb_backend.request import FinishReason


class News(NamedTuple):
    """What has come for one answer since the sender last looked."""

    answer: LiveAnswer
    token_ids: list[int]
    logprobs: list[TokenLogprob]  # one a token, or none at all
    finish_reason: FinishReason

    @property
    def is_failure(self) -> bool:
        return self.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)


class LiveAnswer:
    """One of a request's n answers: an engine request of its own, and the engine client's sink for it."""

    def __init__(self, live: LiveRequest, request_id: int, text: OutputText, logprobs: OutputLogprobs | None) -> None:
        self.request_id = request_id
        self.text = text
        self.logprobs = logprobs
        self.live = live
        # Guarded by the request's lock:
        self.pending: list[int] = []
        self.pending_logprobs: list[TokenLogprob] = []
        self.engine_reason = 0  # FinishReason; other than 0: nothing more comes
        # The thread's on which tokens arrive; times of `time.monotonic`, 0.0: no token has come
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        # The sender thread's own:
        self.unsent_text: list[str] = []
        self.num_unsent_tokens = 0
        self.unsent_ids: list[int] = []  # kept only where the client wants them
        self.num_sent_tokens = 0
        self.finish_reason = FinishReason.NONE

    def on_tokens(self, token_ids: tuple[int, ...], finish_reason: int, attached: Sequence[Delivered] = ()) -> None:
        if not attached:
            self.live.take_tokens(self, token_ids, finish_reason, ())
            return
        self.on_attached(attached)
        logprobs = [value for value in attached if isinstance(value, TokenLogprob)]
        self.live.take_tokens(self, token_ids, finish_reason, logprobs)

    def on_attached(self, attached: Sequence[Delivered]) -> None:
        for value in attached:
            if isinstance(value, ChunkLogprobs) and self.live.prompt_figures is not None:
                self.live.prompt_figures.push(value)

    def on_scheduled(self, scheduled_at: float) -> None:
        self.live.scheduled_at = self.live.scheduled_at or scheduled_at

    def on_error(self, code: ErrorCode, message: str) -> None:
        self.live.end(code, message)

    def push(self, news: News) -> TextDelta:
        """Turn news into text to send. Sender thread only."""
        delta = self.text.push(news.token_ids, news.finish_reason)
        self.num_unsent_tokens += delta.num_tokens
        if self.live.generate is not None and self.live.generate.return_output_ids:
            self.unsent_ids += news.token_ids[: delta.num_tokens]
        if delta.text:
            self.unsent_text.append(delta.text)
        if self.logprobs is not None:
            self.logprobs.push(news.token_ids[: delta.num_tokens], news.logprobs[: delta.num_tokens])
        if self.finish_reason is FinishReason.NONE:
            self.finish_reason = FinishReason.STOP if delta.is_stopped else news.finish_reason
        return delta

    def take_text(self) -> str:
        text = "".join(self.unsent_text)
        self.unsent_text.clear()
        return text

    def take_num_tokens(self) -> int:
        num_tokens, self.num_unsent_tokens = self.num_unsent_tokens, 0
        self.num_sent_tokens += num_tokens
        return num_tokens

    def take_ids(self) -> list[int]:
        ids, self.unsent_ids = self.unsent_ids, []
        return ids

    @property
    def cumulative_logprob(self) -> float:
        return 0.0 if self.logprobs is None else self.logprobs.cumulative

    @property
    def stop_reason(self) -> str:
        """JSON: the stop string or the stop token id that ended the answer, or null."""
        return json.dumps(self.text.stop_reason)

    def take_logprobs(self) -> str:
        return NOT_ASKED_FOR if self.logprobs is None else self.logprobs.take_json()


class LiveRequest:
    """What is owed to one client. `answers` is empty until `begin`."""

    def __init__(
        self,
        request_id: int,
        response_sender: Any,
        news: queue.SimpleQueue[LiveRequest | None],
        inter_token_seconds: list[float],
    ) -> None:
        """`inter_token_seconds` gets every time between tokens, on the thread that calls `take_tokens`."""
        self.arrival_time = time.monotonic()
        self.scheduled_at = 0.0  # when its first step was launched; 0.0: not known
        self._inter_token_seconds = inter_token_seconds
        self.is_first_response_out = False  # the sender thread's own
        self.request_id = request_id  # of the first answer
        # None after the final flag. NOTE: requests and answers refer to each other, so they stay until Python collects
        # garbage, and a sender that outlives the line to the server crashes this process: its memory is shared.
        self.response_sender = response_sender
        self._news = news  # of the sender thread that owns this request
        self._lock = threading.Lock()  # guards the fields of this block
        self._error: tuple[ErrorCode, str] | None = None
        self._is_queued = False
        self.is_ended = False  # nothing more is wanted of the engine
        self.turn_lock = threading.Lock()  # held by the sender thread that serves it
        self.close_lock = threading.Lock()  # held while the final flag is sent, and while the server is asked about it
        self.is_finishing = False  # the sender thread's own: the request is counted, its final response is to be sent
        self.is_closed = False  # the final flag is out; the server's side of the request no longer exists
        # From `begin`:
        self.generate: GenerateRequest | None = None
        self.answers: Sequence[LiveAnswer] = ()
        self.num_input_tokens = 0
        self.prompt_figures: PromptFigures | None = None  # to be sent with the first response
        self.start_others: Callable[[], None] | None = None
        self._is_every_token_news = True

    def begin(
        self,
        generate: GenerateRequest,
        answers: Sequence[LiveAnswer],
        num_input_tokens: int,
        start_others: Callable[[], None] | None = None,
        prompt_figures: PromptFigures | None = None,
    ) -> None:
        """Complete the request with what was found in it; before it goes to the engine.

        `start_others` submits the answers after the first; the sender calls it once, when the first answer's first
        token is there, because then the prompt is in the prefix cache.
        """
        self.generate, self.answers, self.num_input_tokens = generate, answers, num_input_tokens
        self.start_others = start_others
        self.prompt_figures = prompt_figures
        self._is_every_token_news = generate.is_stream or bool(generate.params.stop)

    @property
    def request_ids(self) -> list[int]:
        """Ids at the engine; those that it does not know are harmless."""
        return [answer.request_id for answer in self.answers] or [self.request_id]

    def take_tokens(
        self, answer: LiveAnswer, token_ids: tuple[int, ...], finish_reason: int, logprobs: Sequence[TokenLogprob]
    ) -> None:
        if token_ids:
            self._note_token_times(answer, len(token_ids))
        with self._lock:
            answer.pending.extend(token_ids)
            answer.pending_logprobs.extend(logprobs)
            if finish_reason:
                answer.engine_reason = finish_reason
                self._note_end()
            elif not self._is_every_token_news and self.start_others is None:
                return
            self._queue()

    def _note_token_times(self, answer: LiveAnswer, num_tokens: int) -> None:
        now = time.monotonic()
        if not answer.first_token_time:
            answer.first_token_time = answer.last_token_time = now
            num_tokens -= 1
        for _ in range(num_tokens):
            self._inter_token_seconds.append((now - answer.last_token_time) / num_tokens)
        answer.last_token_time = now

    def end(self, code: ErrorCode, message: str) -> bool:
        """End the request with an error. False if it has ended already, in whichever way."""
        with self._lock:
            if self.is_ended:
                return False
            self.is_ended = True
            self._error = (code, message)
            self._queue()
            return True

    def take_news(self) -> tuple[list[News], tuple[ErrorCode, str] | None]:
        """For the sender thread. Answers without news are left out."""
        with self._lock:
            self._is_queued = False
            news = []
            for answer in self.answers:
                reason = FinishReason(answer.engine_reason)
                if answer.pending or reason is not answer.finish_reason:
                    news.append(News(answer, answer.pending, answer.pending_logprobs, reason))
                    answer.pending, answer.pending_logprobs = [], []
            return news, self._error

    def mark_stopped(self, answer: LiveAnswer) -> None:
        """The sender found a stop string: nothing more of this answer is wanted of the engine."""
        with self._lock:
            answer.engine_reason = FinishReason.STOP
            self._note_end()

    def mark_ended(self) -> None:
        with self._lock:
            self.is_ended = True

    def _note_end(self) -> None:
        if all(answer.engine_reason for answer in self.answers):
            self.is_ended = True

    def _queue(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._news.put(self)
