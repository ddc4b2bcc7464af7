"""Sends what the engine's tokens became as the server's responses, on the sender threads.

One response a token while a sender keeps up; when it is behind, one response carries everything since the last one.
Everything that is sent for a request is sent by its one sender thread, so its responses keep their order and its
final flag goes out exactly once. Where requests come from, and the engine's socket, are not known here.

NOTE: while the server completes a model's configuration, `pb_utils` has only a few of its names, so nothing of it is
touched when this room is imported.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from cb_backend.contracts.errors import ErrorCode
from cb_backend.contracts.request import FinishReason
from cb_backend.serving.latency import Latencies, ThreadLatencies
from cb_backend.serving.live_request import LiveRequest, News
from cb_backend.serving.senders import Senders, Tally

# What the engine's own ends mean for the client, where no text can follow.
_ENGINE_ERROR = {
    FinishReason.ABORT: (ErrorCode.UNAVAILABLE, "the engine ended the request; send it again"),
    FinishReason.ERROR: (ErrorCode.INTERNAL, "the engine could not compute this request; the server's log says why"),
}
_OUTCOME = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}  # in `counts`

DEFAULT_SLOW_READER_TIMEOUT_S = 30.0

logger = logging.getLogger("cb_backend.serving")


class Responder:
    """The sender threads and the requests that are open. `cancel` ends a request at the engine."""

    def __init__(
        self,
        num_threads: int,
        cancel: Callable[[list[int]], None],
        slow_reader_timeout_s: float = DEFAULT_SLOW_READER_TIMEOUT_S,
        stream_interval: int = 1,
    ) -> None:
        """`stream_interval`: tokens from one streamed response to the next, after the first."""
        self._cancel = cancel
        self._slow_reader_timeout_s = slow_reader_timeout_s
        self._stream_interval = stream_interval
        self.latencies = Latencies()
        self._live: dict[int, LiveRequest] = {}  # by request id
        self.on_idle: Callable[[], None] = lambda: None  # before the last open request's final response goes out
        self._num_unfinished = 0
        self._unfinished_lock = threading.Lock()
        self._senders = Senders(num_threads, self.latencies, self._run, self._end_slow_reader, slow_reader_timeout_s)

    def open(self, request_id: int, response_sender: Any) -> LiveRequest:
        """Take responsibility for one final response. Requests go round the sender threads."""
        queues = self._senders.queues
        live = LiveRequest(
            request_id, response_sender, queues[request_id % len(queues)], self.latencies.inter_token_seconds
        )
        self._live[request_id] = live
        with self._unfinished_lock:
            self._num_unfinished += 1
        return live

    def live_requests(self) -> list[LiveRequest]:
        return list(self._live.values())

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_held_up(self) -> int:
        """Sender threads that wait for a client to read."""
        return self._senders.num_held_up

    def counts(self) -> Counter[str]:
        """Totals since the start: `responses`, `coalesced` ones, `output_tokens`, `input_tokens`, and outcomes."""
        total: Counter[str] = Counter()
        for tally in list(self._senders.tallies):
            total.update(tally.counts.copy())
        return total

    def end_all(self, code: ErrorCode, message: str) -> None:
        """End every open request with an error, at the engine too."""
        ended = [live.request_ids for live in self.live_requests() if live.end(code, message)]
        self._cancel([request_id for request_ids in ended for request_id in request_ids])

    def close(self) -> None:
        """Send what is still to be sent, then stop the threads. Call `end_all` first."""
        self._senders.close()

    # ---- sender threads ---------------------------------------------------------------------------------------

    def _run(self, live: LiveRequest, tally: Tally) -> None:
        try:
            self._serve(live, tally.counts, tally.latencies)
        except Exception:
            logger.exception("a response could not be made or sent")
            self._give_up(live, tally.counts)

    def _end_slow_reader(self, live: LiveRequest, tally: Tally) -> None:
        """A response has waited for so long to be taken. What is told here is sent if the client ever reads again."""
        reason = (
            f"the client has not read its responses for {self._slow_reader_timeout_s:g} s, so the request was ended"
        )
        if live.end(ErrorCode.CANCELLED, reason):
            logger.warning("request %d was ended: its client does not read", live.request_id)
            tally.counts["slow_readers"] += 1
            self._cancel(live.request_ids)

    def _serve(self, live: LiveRequest, counts: Counter[str], latencies: ThreadLatencies) -> None:
        """Send what is new of one request, if it makes a response."""
        all_news, error = live.take_news()
        error = error or next((_ENGINE_ERROR[news.finish_reason] for news in all_news if news.is_failure), None)
        if error is not None:
            live.mark_ended()
            if len(live.answers) > 1:  # one failed, the others go with it
                self._cancel(live.request_ids)
            self._send_error(live, *error, counts)
            return
        if not all_news:
            return
        for news in all_news:
            self._take_in(live, news)
        if live.start_others is not None:
            start_others, live.start_others = live.start_others, None
            start_others()
        is_final = all(answer.answer.finish_reason for answer in live.answers)
        if is_final or (live.is_stream and self._is_enough(live)):
            response = self._data_response(live, counts)
            if not live.is_first_response_out:  # its time is taken before it is sent: no client may have it earlier
                live.is_first_response_out = True
                if live.is_measured:
                    latencies.note_first_response(live)
            if not is_final:
                live.response_sender.send(response, flags=0)
            else:  # counted before it is sent, so that the client finds it in the metrics
                if live.is_measured:
                    counts[_OUTCOME[live.answers[0].answer.finish_reason]] += 1
                    counts["input_tokens"] += live.num_input_tokens
                    latencies.note_end(live)
                self._send_final(live, response)

    def _is_enough(self, live: LiveRequest) -> bool:
        """Whether what is there makes a response before the end: it shows, and has tokens as many as the interval."""
        if not any(answer.answer.has_unsent for answer in live.answers):
            return False
        most_tokens = max(answer.answer.num_unsent_tokens for answer in live.answers)
        return not live.is_first_response_out or most_tokens >= self._stream_interval

    def _take_in(self, live: LiveRequest, news: News) -> None:
        is_ended = news.answer.answer.push(news)
        if is_ended and news.finish_reason is FinishReason.NONE:
            live.mark_stopped(news.answer)
            self._cancel([news.answer.request_id])

    def _data_response(self, live: LiveRequest, counts: Counter[str]) -> Any:
        """One response with what every answer has to say; what is the prompt's, only the first says."""
        num_tokens = [answer.answer.num_unsent_tokens for answer in live.answers]
        parts = [answer.answer.tensors() for answer in live.answers]
        for answer, count in zip(live.answers, num_tokens, strict=True):
            answer.num_sent_tokens += count
        tensors = [pb_utils.Tensor(name, _joined([part[name] for part in parts if name in part])) for name in parts[0]]
        counts["responses"] += 1
        counts["output_tokens"] += sum(num_tokens)
        if live.is_stream and max(num_tokens) > 1:
            counts["coalesced"] += 1
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def _send_error(self, live: LiveRequest, code: ErrorCode, message: str, counts: Counter[str]) -> None:
        counts["responses"] += 1
        counts[code.name.lower()] += 1
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code.name))
        self._send_final(live, pb_utils.InferenceResponse(output_tensors=[], error=error))

    def _send_final(self, live: LiveRequest, response: Any) -> None:
        self._note_finishing(live)
        with live.close_lock:
            live.is_closed = True
            self._live.pop(live.request_id, None)
            try:
                live.response_sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            finally:
                live.response_sender = None

    def _give_up(self, live: LiveRequest, counts: Counter[str]) -> None:
        """Last resort when sending failed: an error response if one can be sent, and nothing left open."""
        live.mark_ended()
        self._cancel(live.request_ids)
        if live.is_closed:
            return
        try:
            self._send_error(live, ErrorCode.INTERNAL, "the response could not be sent", counts)
        except Exception:
            logger.exception("the error response could not be sent either")
            self._note_finishing(live)
            with live.close_lock:
                live.is_closed = True
                live.response_sender = None
            self._live.pop(live.request_id, None)

    def _note_finishing(self, live: LiveRequest) -> None:
        """The request is counted; only its final response is still to be sent."""
        if live.is_finishing:
            return
        live.is_finishing = True
        with self._unfinished_lock:
            self._num_unfinished -= 1
            is_last = self._num_unfinished == 0
        if is_last:
            self.on_idle()


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
