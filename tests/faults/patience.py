"""How long clients waited, from their histories alone: for the first text, between texts, and behind whom.

Seconds depend on the machine, so they are told and not judged. What is judged is order: in a closed loop of n streams a
request that gets its first text only after more than 2 n requests have got theirs that were sent after it was starved.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tests.faults.history import Event, by_request

MAX_PASSES = 2  # times the number of streams


@dataclass(frozen=True, slots=True)
class Wait:
    """Of one request that was neither refused nor cancelled before its first text. Seconds."""

    request: str
    sent: float
    first: float  # when its first text came
    num_texts: int
    longest_silence_s: float  # between two texts
    seconds: float  # from the first to the last text


def waits(events: Sequence[Event]) -> list[Wait]:
    """By the time of the first text."""
    found = []
    for request, own in by_request(list(events)):
        texts = [event.time for event in own if event.kind in ("delta", "final")]
        if texts and own[0].role != "bad":
            gaps = [after - before for before, after in itertools.pairwise(texts)]
            longest, seconds = max(gaps, default=0.0), texts[-1] - texts[0]
            found.append(Wait(request, own[0].time, texts[0], len(texts), longest, seconds))
    return sorted(found, key=lambda wait: wait.first)


def num_passed(found: Sequence[Wait]) -> list[int]:
    """For each wait, how many requests were sent after it and got their first text before it."""
    sent: list[float] = []  # of those that have started, sorted
    counts = []
    for wait in found:
        counts.append(len(sent) - bisect_left(sent, wait.sent))
        insort(sent, wait.sent)
    return counts


def report(events: Sequence[Event], num_streams: int) -> Iterator[str]:
    """Lines to print; those that tell of a starved request begin with '!'."""
    found = waits(events)
    if not found:
        yield "! no request got any text"
        return
    counts = num_passed(found)
    paces = [wait.seconds / (wait.num_texts - 1) for wait in found if wait.num_texts > 1]
    rows = {
        "s to the first text": [wait.first - wait.sent for wait in found],
        "s between two texts, mean of a request": paces or [0.0],
        "longest silence of a request, s": [wait.longest_silence_s for wait in found],
        "passed by so many requests": [float(count) for count in counts],
    }
    yield f"  {'clients waited':42}{'p50':>9}{'p99':>9}{'max':>9}"
    for name, values in rows.items():
        p50, p99 = np.percentile(values, [50, 99])
        yield f"  {name:42}{p50:9.2f}{p99:9.2f}{max(values):9.2f}"
    limit = MAX_PASSES * num_streams
    for wait, count in zip(found, counts, strict=True):
        if count > limit:
            yield f"! {wait.request} was passed by {count} requests before its first text; at most {limit} may"
