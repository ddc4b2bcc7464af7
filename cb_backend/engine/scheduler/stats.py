"""What is counted and learned of requests: figures for the metrics, and how many tokens a request will generate.

The longer a request has run already, the longer are the ones it is compared with. Knows numbers only.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_SAMPLES = 1024
FIRST_SAMPLES = (16,) * 8  # what is believed before anything is known: answers are short, so that a burst can start
_MIN_ALIKE = 8  # fewer requests that ran as long: what has come is likely to come once more
_USED_SHARE_RATE = 0.05  # by which a request that has ended moves `used_share`

Floats = NDArray[np.float64]


class Counters(msgspec.Struct):
    """Counts since the engine's start, under their names in `messages.EngineStats`."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cancelled: int = 0
    num_timed_out: int = 0


class OutputLengths:
    """The last `MAX_SAMPLES` numbers of tokens that requests generated until they ended by themselves or at a limit."""

    def __init__(self) -> None:
        self.used_share = 0.0  # of the tokens allowed to requests that ended lately; 0 until one has
        self._samples = np.zeros(MAX_SAMPLES)
        self._samples[: len(FIRST_SAMPLES)] = FIRST_SAMPLES
        self._num_added = 0
        self._is_sorted = False
        self._sorted = self._sums = self._squares = np.zeros(0)

    def add(self, num_output_tokens: int, num_allowed: int) -> None:
        """A request has ended after so many tokens."""
        self.used_share += _USED_SHARE_RATE * (num_output_tokens / num_allowed - self.used_share)
        self._samples[self._num_added % MAX_SAMPLES] = num_output_tokens
        self._num_added += 1
        self._is_sorted = False

    def still_to_come(self, num_generated: NDArray[np.int32]) -> tuple[Floats, Floats]:
        """Mean and standard deviation of what requests generate after so many tokens. All arrays [num_requests]."""
        if not self._is_sorted:
            self._sort()
        first = np.searchsorted(self._sorted, num_generated, side="right")  # of those that ran longer
        num_alike = len(self._sorted) - first
        is_known = num_alike >= _MIN_ALIKE
        count = np.maximum(num_alike, 1)
        mean = np.where(is_known, self._sums[first] / count, 2.0 * num_generated)
        variance = np.where(is_known, self._squares[first] / count - mean * mean, num_generated.astype(float) ** 2)
        return (mean - num_generated).astype(np.float64), np.sqrt(np.maximum(variance, 0.0)).astype(np.float64)

    def _sort(self) -> None:
        self._sorted = np.sort(self._samples[: min(max(self._num_added, len(FIRST_SAMPLES)), MAX_SAMPLES)])
        zero = np.zeros(1)  # nobody ran longer than the longest
        self._sums = np.concatenate([np.cumsum(self._sorted[::-1])[::-1], zero])
        self._squares = np.concatenate([np.cumsum(self._sorted[::-1] ** 2)[::-1], zero])
        self._is_sorted = True


def most_growth(held: Floats, to_come: Floats) -> float:
    """Tokens by which all requests together grow until most are held, if each ends after `to_come` more [num_requests].

    They grow side by side and give up what they hold when they end; so the most is held when one of them ends.
    (Gong et al., Past-Future Scheduler, ASPLOS 2025.)
    """
    if not len(held):
        return 0.0
    order = np.argsort(to_come)
    held, to_come = held[order], to_come[order]
    left = np.cumsum(held[::-1])[::-1]  # held now by those that have not ended when the k-th does
    totals = left + to_come * np.arange(len(held), 0, -1)
    return float(totals.max() - left[0])
