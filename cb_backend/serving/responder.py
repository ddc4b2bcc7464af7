"""Turns the engine's tokens into the server's responses: several sender threads, requests sharded over them.

One response a token while a sender keeps up; when it is behind, one response carries everything since the last one.
Everything that is sent for a request is sent by its one sender thread, so its responses keep their order and its
final flag goes out exactly once. Where requests come from, and the engine's socket, are not known here.

NOTE: while the server completes a model's configuration, `pb_utils` has only a few of its names, so nothing of it is
touched when this room is imported.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from cb_backend.errors import ErrorCode
from cb_backend.front_end.output_text import OutputText
from cb_backend.front_end.protocol import GenerateRequest
from cb_backend.request import FinishReason

# What the engine's own ends mean for the client, where no text can follow.
_ENGINE_ERROR = {
    FinishReason.ABORT: (ErrorCode.UNAVAILABLE, "the engine ended the request; send it again"),
    FinishReason.ERROR: (ErrorCode.INTERNAL, "the engine could not compute this request; the server's log says why"),
}
_FINISH_NAME = {FinishReason.NONE: "None", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

logger = logging.getLogger("cb_backend.serving")


class LiveRequest:
    """One request from `execute` to its final response; the engine client's sink for it.

    Other threads leave news here (tokens, an end, an error) and queue it for its sender thread; only that thread
    reads the news, detokenises and sends.
    """

    def __init__(self, request_id: int, response_sender: Any, news: queue.SimpleQueue[LiveRequest | None]) -> None:
        self.request_id = request_id
        self.response_sender = response_sender
        self._news = news  # of the sender thread that owns this request
        self._lock = threading.Lock()  # guards the fields of this block
        self._pending: list[int] = []  # tokens not yet looked at by the sender
        self._finish_reason = 0
        self._error: tuple[ErrorCode, str] | None = None
        self._is_queued = False
        self.is_ended = False  # nothing more is wanted of the engine
        self.close_lock = threading.Lock()  # held while the final flag is sent, and while the server is asked about it
        self.is_closed = False  # the final flag is out; the server's side of the request no longer exists
        # From `begin`:
        self.generate: GenerateRequest | None = None
        self.output: OutputText | None = None
        self.num_input_tokens = 0
        self._is_every_token_news = True
        # The sender thread's own:
        self.unsent_text: list[str] = []
        self.num_unsent_tokens = 0

    def begin(self, generate: GenerateRequest, output: OutputText, num_input_tokens: int) -> None:
        """Complete the request with what was found in it; before it goes to the engine."""
        self.generate, self.output, self.num_input_tokens = generate, output, num_input_tokens
        self._is_every_token_news = generate.is_stream or bool(generate.params.stop)

    def on_tokens(self, token_ids: tuple[int, ...], finish_reason: int) -> None:
        with self._lock:
            self._pending.extend(token_ids)
            if finish_reason:
                self._finish_reason = finish_reason
                self.is_ended = True
            elif not self._is_every_token_news:
                return
            self._queue()

    def on_error(self, code: ErrorCode, message: str) -> None:
        self.end(code, message)

    def end(self, code: ErrorCode, message: str) -> bool:
        """End the request with an error. False if it has ended already, in whichever way."""
        with self._lock:
            if self.is_ended:
                return False
            self.is_ended = True
            self._error = (code, message)
            self._queue()
            return True

    def take_news(self) -> tuple[list[int], FinishReason, tuple[ErrorCode, str] | None]:
        with self._lock:
            self._is_queued = False
            tokens, self._pending = self._pending, []
            return tokens, FinishReason(self._finish_reason), self._error

    def mark_ended(self) -> None:
        with self._lock:
            self.is_ended = True

    def _queue(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._news.put(self)


class Responder:
    """The sender threads and the requests that are open. `cancel` ends a request at the engine."""

    def __init__(self, num_threads: int, cancel: Callable[[list[int]], None]) -> None:
        self._cancel = cancel
        self._news: list[queue.SimpleQueue[LiveRequest | None]] = [queue.SimpleQueue() for _ in range(num_threads)]
        self._counts: list[Counter[str]] = [Counter() for _ in range(num_threads)]  # one a thread, so no lock
        self._live: dict[int, LiveRequest] = {}  # by request id
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"sender-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def open(self, request_id: int, response_sender: Any) -> LiveRequest:
        """Take responsibility for one final response. Requests go round the sender threads."""
        live = LiveRequest(request_id, response_sender, self._news[request_id % len(self._news)])
        self._live[request_id] = live
        return live

    def live_requests(self) -> list[LiveRequest]:
        return list(self._live.values())

    @property
    def num_live(self) -> int:
        return len(self._live)

    def counts(self) -> Counter[str]:
        """Totals since the start: `responses`, `output_tokens`, `input_tokens`, and requests by outcome."""
        total: Counter[str] = Counter()
        for counts in self._counts:
            total.update(counts.copy())
        return total

    def end_all(self, code: ErrorCode, message: str) -> None:
        """End every open request with an error, at the engine too."""
        ended = [live.request_id for live in self.live_requests() if live.end(code, message)]
        self._cancel(ended)

    def close(self) -> None:
        """Send what is still to be sent, then stop the threads. Call `end_all` first."""
        for news in self._news:
            news.put(None)
        for thread in self._threads:
            thread.join()

    # ---- sender threads ---------------------------------------------------------------------------------------

    def _run(self, index: int) -> None:
        news, counts = self._news[index], self._counts[index]
        while (live := news.get()) is not None:
            if live.is_closed:
                continue
            try:
                self._serve(live, counts)
            except Exception:
                logger.exception("a response could not be made or sent")
                self._give_up(live, counts)

    def _serve(self, live: LiveRequest, counts: Counter[str]) -> None:
        """Send what is new of one request, if it makes a response."""
        tokens, reason, error = live.take_news()
        error = error or _ENGINE_ERROR.get(reason)
        if error is not None:
            self._send_error(live, *error, counts)
            return
        assert live.generate is not None  # tokens come only after `begin`
        assert live.output is not None
        delta = live.output.push(tokens, reason)
        live.num_unsent_tokens += delta.num_tokens
        if delta.text:
            live.unsent_text.append(delta.text)
        if delta.is_stopped:
            if reason is FinishReason.NONE:
                live.mark_ended()
                self._cancel([live.request_id])
            reason = FinishReason.STOP
        if reason is not FinishReason.NONE or (live.generate.is_stream and live.unsent_text):
            self._send_data(live, live.generate, reason, counts)

    def _send_data(
        self, live: LiveRequest, generate: GenerateRequest, reason: FinishReason, counts: Counter[str]
    ) -> None:
        text = "".join(live.unsent_text)
        if generate.is_input_prepended:
            text = generate.text + text
        tensors = [_text_tensor("text_output", text)]
        if generate.return_finish_reason:
            tensors.append(_text_tensor("finish_reason", _FINISH_NAME[reason]))
        if generate.return_num_input_tokens:
            tensors.append(_count_tensor("num_input_tokens", live.num_input_tokens))
        if generate.return_num_output_tokens:
            tensors.append(_count_tensor("num_output_tokens", live.num_unsent_tokens))
        counts["responses"] += 1
        counts["output_tokens"] += live.num_unsent_tokens
        live.unsent_text.clear()
        live.num_unsent_tokens = 0
        response = pb_utils.InferenceResponse(output_tensors=tensors)
        if reason is FinishReason.NONE:
            live.response_sender.send(response, flags=0)
        else:
            counts[_FINISH_NAME[reason]] += 1
            counts["input_tokens"] += live.num_input_tokens
            self._send_final(live, response)

    def _send_error(self, live: LiveRequest, code: ErrorCode, message: str, counts: Counter[str]) -> None:
        counts["responses"] += 1
        counts[code.name.lower()] += 1
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code.name))
        self._send_final(live, pb_utils.InferenceResponse(output_tensors=[], error=error))

    def _send_final(self, live: LiveRequest, response: Any) -> None:
        with live.close_lock:
            live.is_closed = True
            self._live.pop(live.request_id, None)
            live.response_sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _give_up(self, live: LiveRequest, counts: Counter[str]) -> None:
        """Last resort when sending failed: an error response if one can be sent, and nothing left open."""
        live.mark_ended()
        self._cancel([live.request_id])
        if live.is_closed:
            return
        try:
            self._send_error(live, ErrorCode.INTERNAL, "the response could not be sent", counts)
        except Exception:
            logger.exception("the error response could not be sent either")
            live.is_closed = True
            self._live.pop(live.request_id, None)


def _text_tensor(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode(errors="replace")], dtype=np.object_))  # [1]


def _count_tensor(name: str, count: int) -> Any:
    return pb_utils.Tensor(name, np.array([count], dtype=np.uint32))  # [1]
