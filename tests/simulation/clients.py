"""The clients of a simulated world: what each was told, and whether that is what it had to be told.

I5 one final answer, nothing after it, a reason from a closed list · I6 the pieces joined are the text · I7 the tokens
are those of the lone run. The expected text is made from the bytes of the ids, not by the code under test.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cb_backend.contracts.errors import ErrorCode
from cb_backend.contracts.packed_logprobs import Delivered, PooledRow
from cb_backend.contracts.request import FinishReason
from cb_backend.front_end.text.output_text import OutputText
from cb_backend.front_end.text.tokenizer import Tokenizer
from tests.fakes.counting_runner import write_byte_tokenizer
from tests.simulation.network import SimulatedClient
from tests.simulation.scenario import Arrival

STOP, LENGTH, FAILED = "stop", "length", "failed"
CANCELLED, UNAVAILABLE, REFUSED, INTERNAL = "cancelled", "unavailable", "refused", "internal"
GONE = "gone"  # with the front end
ENDS = (STOP, LENGTH, FAILED, CANCELLED, UNAVAILABLE, REFUSED, INTERNAL, GONE)
_OF_REASON = {FinishReason.STOP: STOP, FinishReason.LENGTH: LENGTH, FinishReason.ERROR: FAILED}
_OF_CODE = {
    ErrorCode.UNAVAILABLE: UNAVAILABLE,
    ErrorCode.INVALID_ARG: REFUSED,
    ErrorCode.INTERNAL: INTERNAL,
}


@cache
def byte_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder))
        return Tokenizer(folder)


class Answer:
    """What one client has heard. The engine client's sink for its request."""

    def __init__(
        self,
        arrival: Arrival,
        client: SimulatedClient,
        expected_ids: list[int],
        arrived_at: float,
        expected_pooled: list[float] | None = None,
    ) -> None:
        self.arrival = arrival
        self.expected_pooled = expected_pooled
        self.pooled: list[list[float]] = []
        self.client = client
        self.expected_ids = expected_ids
        self.arrived_at = arrived_at
        self.end: str | None = None  # how it ended
        self.message = ""  # of an error
        self.token_ids: list[int] = []
        self.text = ""
        self.num_counted = 0  # tokens that the client is told of
        self.violation: str | None = None
        self.was_cancelled = False
        self.has_timed_out = False
        self._output = OutputText(byte_tokenizer(), arrival.params)

    @property
    def is_open(self) -> bool:
        return self.end is None

    def on_scheduled(self, scheduled_at: float) -> None:
        if self.token_ids:
            self.violation = "the time of the first step is told after the first token"

    def on_tokens(self, token_ids: tuple[int, ...], finish_reason: int, attached: Sequence[Delivered] = ()) -> None:
        if self.end is not None:
            self.violation = f"I5: tokens after the end ({self.end})"
        self.pooled += [value.values.tolist() for value in attached if isinstance(value, PooledRow)]
        delta = self._output.push(token_ids, FinishReason(finish_reason))
        self.token_ids += token_ids
        self.text += delta.text
        self.num_counted += delta.num_tokens
        if delta.is_stopped:
            self.end = STOP
            if not finish_reason:
                self.client.cancel([self.arrival.request_id])
        elif finish_reason:
            self.end = _OF_REASON.get(FinishReason(finish_reason), "unknown reason")

    def on_error(self, code: ErrorCode, message: str) -> None:
        if self.end is not None:
            self.violation = f"I5: an error after the end ({self.end}): {message}"
        self.end, self.message = _OF_CODE.get(code, code.name), message

    def cancel(self) -> None:
        self.client.cancel([self.arrival.request_id])
        self.end = self.end or CANCELLED

    def check(self, may_fail: bool) -> None:
        """The whole history, once it has ended. `may_fail`: a step with it has failed, or its text has."""
        assert self.violation is None, self.violation
        assert self.end in ENDS, f"I5: ended with {self.end}"
        if self.arrival.pooling is not None:
            self._check_pooled(may_fail)
            return
        expected_ids, end = self.expected_ids, _expected_end(self.arrival, self.expected_ids)
        if self.arrival.fails_at is not None:
            num_before = max(0, self.arrival.fails_at - len(self.arrival.prompt))
            if num_before < len(expected_ids):
                expected_ids, end = expected_ids[:num_before], FAILED
        num_ids, text, is_stopped = _expected_text(self.arrival, expected_ids, end)
        if is_stopped:
            end = STOP
        if self.end in (STOP, LENGTH) or (self.end == FAILED and not may_fail):
            assert self.end == end, f"I5: ended with {self.end}, not {end}"
            assert self.num_counted == num_ids, f"I6: {self.num_counted} tokens are told of, not {num_ids}"
            assert self.token_ids[:num_ids] == expected_ids[:num_ids], "I7: differs from the lone run"
            assert self.end == FAILED or self.text == text, f"I6: the text is {self.text!r}, not {text!r}"
        assert self.token_ids == self.expected_ids[: len(self.token_ids)], "I7: begins otherwise than the lone run"
        if self.end != FAILED:  # an error is told without text, so what its end flushes is not
            assert text.startswith(self.text.rstrip("\ufffd")), f"I6: {self.text!r} is no beginning of {text!r}"

    def _check_pooled(self, may_fail: bool) -> None:
        """I5, I7 of a pooling request: one result and no token, or none and a reason."""
        fails_at = self.arrival.fails_at
        assert self.token_ids == [], "I5: a pooling request has tokens"
        assert len(self.pooled) == 1 or self.end != STOP, "I5: no result, or several"
        assert all(pooled == self.expected_pooled for pooled in self.pooled), "I7: differs from the lone run"
        assert not self.pooled or self.end in (STOP, INTERNAL), "I5: a result beside an error"  # which a sink has made
        assert self.end != LENGTH, "I5: a pooling request has no length"
        will_fail = fails_at is not None and fails_at <= len(self.arrival.prompt)
        assert self.end != STOP or not will_fail, "I14: a row that failed has a result"
        assert self.end != FAILED or will_fail or may_fail, "I14: failed for nothing"


def _expected_end(arrival: Arrival, ids: list[int]) -> str:
    is_stop = bool(ids) and ids[-1] in arrival.params.stop_token_ids and len(ids) >= arrival.params.min_tokens
    return STOP if is_stop else LENGTH


def _expected_text(arrival: Arrival, ids: list[int], end: str) -> tuple[int, str, bool]:
    """(tokens that count, the text, whether a stop string ends it)."""
    params = arrival.params
    shows_stop = params.include_stop_str_in_output
    visible = ids[:-1] if end == STOP and not shows_stop else ids
    for stop in params.stop:
        data, wanted = bytes(visible), stop.encode()
        for n in range(params.min_tokens + 1, len(data) + 1):
            if data[:n].endswith(wanted):
                return n, data[: n if shows_stop else n - len(wanted)].decode(), True
    return len(ids), bytes(i for i in visible if i < 256).decode(errors="replace"), False
