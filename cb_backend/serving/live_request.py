"""One request from `execute` to its final response, and the answers that it is to bring.

Other threads leave news here (tokens, an end, an error) and queue the request for its sender thread; only that thread
reads the news, makes responses of it and sends them. What an answer's tokens become is its `Answer`'s business, what is
sent and when the responder's.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from cb_backend.contracts.errors import ErrorCode
from cb_backend.contracts.packed_logprobs import ChunkLogprobs, Delivered, PooledRow, TokenLogprob
from cb_backend.contracts.request import FinishReason


class News(NamedTuple):
    """What has come for one answer since the sender last looked."""

    answer: LiveAnswer
    token_ids: list[int]
    logprobs: list[TokenLogprob]  # one a token, or none at all
    finish_reason: FinishReason

    @property
    def is_failure(self) -> bool:
        return self.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)


class Answer(Protocol):
    """What the tokens of one answer become on their way to the client. The sender thread's own, but for `on_prompt`."""

    finish_reason: FinishReason  # the client's: it may have ended before the engine says so
    num_unsent_tokens: int  # that count as output, since the last `tensors`

    @property
    def has_unsent(self) -> bool:
        """Whether a response now would show the client anything."""
        ...

    def push(self, news: News) -> bool:
        """Take what has come. True: this ends the answer, whatever the engine would still make."""
        ...

    def on_prompt(self, value: ChunkLogprobs | PooledRow) -> None:
        """Figures of the prompt, or what was read off it, on the thread on which tokens arrive; quick."""
        ...

    def tensors(self) -> dict[str, NDArray[Any]]:
        """What is new since the last call, an array for each output by its name; those of n answers are joined."""
        ...


class LiveAnswer:
    """One of a request's n answers: an engine request of its own, and the engine client's sink for it."""

    def __init__(self, live: LiveRequest, request_id: int, answer: Answer) -> None:
        self.request_id = request_id
        self.answer = answer
        self.live = live
        # Guarded by the request's lock:
        self.pending: list[int] = []
        self.pending_logprobs: list[TokenLogprob] = []
        self.engine_reason = 0  # FinishReason; other than 0: nothing more comes
        # The thread's on which tokens arrive; times of `time.monotonic`, 0.0: no token has come
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        self.num_sent_tokens = 0  # the sender thread's own

    def on_tokens(self, token_ids: tuple[int, ...], finish_reason: int, attached: Sequence[Delivered] = ()) -> None:
        if not attached:
            self.live.take_tokens(self, token_ids, finish_reason, ())
            return
        self.on_attached(attached)
        logprobs = [value for value in attached if isinstance(value, TokenLogprob)]
        self.live.take_tokens(self, token_ids, finish_reason, logprobs)

    def on_attached(self, attached: Sequence[Delivered]) -> None:
        for value in attached:
            if isinstance(value, ChunkLogprobs | PooledRow):
                self.answer.on_prompt(value)

    def on_scheduled(self, scheduled_at: float) -> None:
        self.live.scheduled_at = self.live.scheduled_at or scheduled_at

    def on_error(self, code: ErrorCode, message: str) -> None:
        self.live.end(code, message)


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
        self.is_measured = True  # an answer is generated, so its times and tokens count
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
        self.answers: Sequence[LiveAnswer] = ()
        self.num_input_tokens = 0
        self.is_stream = False
        self.start_others: Callable[[], None] | None = None
        self._is_every_token_news = True

    def begin(
        self,
        answers: Sequence[LiveAnswer],
        num_input_tokens: int,
        *,
        is_stream: bool,
        may_end_itself: bool,
        start_others: Callable[[], None] | None = None,
    ) -> None:
        """Complete the request with what was found in it; before it goes to the engine.

        `may_end_itself`: `Answer.push` may say so, thus it must see every token at once even if nothing is streamed.
        `start_others` submits the answers after the first; the sender calls it once, when the first answer's first
        token is there, because then the prompt is in the prefix cache.
        """
        self.answers, self.num_input_tokens, self.is_stream = answers, num_input_tokens, is_stream
        self.start_others = start_others
        self._is_every_token_news = is_stream or may_end_itself

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
                if answer.pending or reason is not answer.answer.finish_reason:
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
