"""How long requests took and how big they were, counted where it happens and read by whoever exports it.

Each thread that counts has buckets of its own, so nothing here takes a lock. It does not know the server.

What the figures mean: a request begins when the server hands it over, and ends when its final response is handed back.
Its first token counts when its first response is handed back (of a request that does not stream: when its first token
came). Queue, prefill and decode time are the parts before its first step, from there to its first token, and from there
to its last; they leave out the sending.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from cb_backend.serving.live_request import LiveAnswer, LiveRequest
from cb_backend.support.buckets import BucketCounts, one_two_five, total_of

# Bounds in seconds. They hold those that vLLM uses, so that its histograms can be made of the same counts.
_FIRST_TOKEN = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
)
_INTER_TOKEN = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_WHOLE = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 300.0)
_TOKENS = one_two_five(1_000_000)

BOUNDS: dict[str, tuple[float, ...]] = {
    "time_to_first_token": _FIRST_TOKEN,
    "queue_time": _FIRST_TOKEN,
    "prefill_time": _FIRST_TOKEN,
    "decode_time": _WHOLE,
    "e2e_latency": _WHOLE,
    "prompt_tokens": _TOKENS,
    "output_tokens": _TOKENS,
    "num_answers": (1, 2, 5, 10, 20),
    "inter_token": _INTER_TOKEN,
}

Totals = tuple[list[int], list[float]]  # counts and sums by bucket


class ThreadLatencies:
    """What one sender thread has seen of requests, by the names of `BOUNDS`."""

    def __init__(self) -> None:
        self.buckets = {name: BucketCounts(bounds) for name, bounds in BOUNDS.items() if name != "inter_token"}

    def note_first_response(self, live: LiveRequest) -> None:
        first_token = time.monotonic() if live.is_stream else times_of(live.answers).first
        if first_token:
            self.buckets["time_to_first_token"].add(first_token - live.arrival_time)

    def note_end(self, live: LiveRequest) -> None:
        """The final response is about to be sent, and it is no error."""
        buckets, times = self.buckets, times_of(live.answers)
        buckets["e2e_latency"].add(time.monotonic() - live.arrival_time)
        buckets["prompt_tokens"].add(live.num_input_tokens)
        buckets["output_tokens"].add(sum(answer.num_sent_tokens for answer in live.answers))
        buckets["num_answers"].add(len(live.answers))
        if times.first and live.scheduled_at:
            buckets["queue_time"].add(max(live.scheduled_at - live.arrival_time, 0.0))
            buckets["prefill_time"].add(max(times.first - live.scheduled_at, 0.0))
            buckets["decode_time"].add(times.last - times.first)


class Latencies:
    """Those of all sender threads, and of the one thread on which tokens arrive.

    That thread only appends to `inter_token_seconds`; sorting into buckets is left to whoever asks for the totals,
    because a thousand at once cost a tenth of one by one.
    """

    def __init__(self) -> None:
        self.threads: list[ThreadLatencies] = []
        self.inter_token_seconds: list[float] = []
        self._inter_token = BucketCounts(BOUNDS["inter_token"])

    def new_thread(self) -> ThreadLatencies:
        self.threads.append(ThreadLatencies())
        return self.threads[-1]

    def totals(self) -> dict[str, Totals]:
        """Since the start, by the names of `BOUNDS`. One caller at a time."""
        count = len(self.inter_token_seconds)  # NOTE: more may be appended meanwhile, at the end
        self._inter_token.add_all(self.inter_token_seconds[:count])
        del self.inter_token_seconds[:count]
        names = (name for name in BOUNDS if name != "inter_token")
        threads = self.threads or [ThreadLatencies()]
        totals = {name: total_of(thread.buckets[name] for thread in threads) for name in names}
        return {**totals, "inter_token": self._inter_token.read()}


class _Times(NamedTuple):
    first: float  # token of any answer; 0.0: none has come
    last: float


def times_of(answers: Sequence[LiveAnswer]) -> _Times:
    firsts = [answer.first_token_time for answer in answers if answer.first_token_time]
    return _Times(min(firsts), max(answer.last_token_time for answer in answers)) if firsts else _Times(0.0, 0.0)
