"""Counts by size: what a histogram is made of, cheap enough to be kept for every token and every step.

One thread adds; any thread may read. Knows nothing of metrics, requests or the server.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np


class BucketCounts:
    """How many values fell below each bound, and their sum. Only the owner's thread may call `add`.

    Counts stand beside sums bucket by bucket, so that values can later be told to somebody else as "n times the mean
    of this bucket", which keeps counts and total sum exact whatever the number of values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: ascending, each the largest value of its bucket; one more bucket holds everything above."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sums = [0.0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        index = bisect_left(self.bounds, value)
        # NOTE: the sum first. A reader that comes between the lines takes counts first, and so never sees a count
        # without its sum.
        self.sums[index] += value
        self.counts[index] += 1

    def add_all(self, values: Sequence[float]) -> None:
        """Like `add` for each of them, a few hundred at a time."""
        if not values:
            return
        array = np.asarray(values, np.float64)
        indices = np.searchsorted(self.bounds, array)
        sums = np.bincount(indices, array, len(self.sums)).tolist()
        counts = np.bincount(indices, minlength=len(self.counts)).tolist()
        self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)]
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]

    def read(self) -> tuple[list[int], list[float]]:
        """Copies of counts and sums, [num_bounds + 1] each."""
        counts = self.counts.copy()
        return counts, self.sums.copy()


def total_of(sources: Iterable[BucketCounts]) -> tuple[list[int], list[float]]:
    """Counts and sums of several with the same bounds, added up."""
    parts = [source.read() for source in sources]
    counts = [sum(column) for column in zip(*(counts for counts, _ in parts), strict=True)]
    sums = [sum(column) for column in zip(*(sums for _, sums in parts), strict=True)]
    return counts, sums


def one_two_five(limit: float) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    bounds = []
    power = 1
    while power <= limit:
        bounds += [power * digit for digit in (1, 2, 5) if power * digit <= limit]
        power *= 10
    return tuple(bounds)
