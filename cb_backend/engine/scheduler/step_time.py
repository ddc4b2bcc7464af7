"""How long a step takes, learned while serving: seconds = a + b * tokens + c * attention pairs.

An attention pair is one computed token looking at one token before it, so that c stands for the length of contexts.
The fit is least squares over the last hundred or so steps of two kinds, kept apart so that a long time of decoding
does not make what is known of prompts fade. It decides how many prompt tokens may ride along with running streams
(`max_itl_ms`). This module has no clock: times are told to it.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from cb_backend.engine.scheduler.non_negative import non_negative_solution

MIN_PREFILL_TOKENS = 16  # a step's prompt tokens even where the limit leaves no room: prompts must go on
_FORGETTING = 0.99
_NUM_TRIALS = 4  # steps with prompts before the fit is asked
_FIRST_TRIAL_TOKENS = 64
_MOST_GROWTH = 2  # times the most tokens seen so far: the fit is not trusted far outside what it has seen
_MOST_OUTLIER = 3.0  # times the expected seconds: more (a pause of the host) counts as so much
_SCALE = np.array([1.0, 1e-3, 1e-6])  # of the features, so that the normal equations are well conditioned


class StepTimeModel:
    """Least squares with forgetting. Coefficients are never negative."""

    def __init__(self) -> None:
        # Of steps without and with prompts: normal matrix [3, 3] and right-hand side [3].
        self._matrices = np.zeros((2, 3, 3))
        self._sides = np.zeros((2, 3))
        self._coefficients: NDArray[np.float64] | None = None
        self.num_prefill_samples = 0
        self.relative_error = 0.2  # moving average

    def observe(self, num_tokens: int, num_pairs: float, has_prefill: bool, seconds: float) -> None:
        """One step took `seconds`."""
        if self.num_prefill_samples >= _NUM_TRIALS:
            expected = self.seconds(num_tokens, num_pairs)
            if expected > 0:
                seconds = min(seconds, _MOST_OUTLIER * expected)
                self.relative_error += 0.02 * (abs(seconds - expected) / expected - self.relative_error)
        features = np.array([1.0, num_tokens, num_pairs]) * _SCALE
        kind = int(has_prefill)
        self._matrices[kind] = _FORGETTING * self._matrices[kind] + np.outer(features, features)
        self._sides[kind] = _FORGETTING * self._sides[kind] + features * seconds
        self.num_prefill_samples += has_prefill
        self._coefficients = None

    def coefficients(self) -> tuple[float, float, float]:
        """(a, b, c) in seconds, a token, an attention pair."""
        if self._coefficients is None:
            self._coefficients = non_negative_solution(self._matrices.sum(0), self._sides.sum(0)) * _SCALE
        a, b, c = self._coefficients.tolist()
        return a, b, c

    def seconds(self, num_tokens: int, num_pairs: float) -> float:
        a, b, c = self.coefficients()
        return a + b * num_tokens + c * num_pairs


class Pace:
    """Keeps steps that carry running streams below a time limit, by the number of prompt tokens in them."""

    def __init__(self, max_itl_ms: float) -> None:
        self._limit_s = max_itl_ms / 1000
        self._most_seen = _FIRST_TRIAL_TOKENS // _MOST_GROWTH
        self._launched: deque[tuple[int, int, float, bool, float]] = deque()  # id, tokens, pairs, has prompts, time
        self._last_end = -math.inf
        self.model = StepTimeModel()

    def launched(
        self,
        step_id: int,
        num_computed: NDArray[np.int32],
        num_scheduled: NDArray[np.int32],
        num_decode: int,
        now: float,
    ) -> None:
        """A step has been planned. Arrays [num_rows], as in its plan."""
        has_prefill = num_decode < len(num_scheduled)
        num_tokens = int(num_scheduled.sum())
        num_pairs = float(np.dot(num_scheduled, num_computed + num_scheduled / 2))
        self._launched.append((step_id, num_tokens, num_pairs, has_prefill, now))

    def completed(self, step_id: int, now: float) -> None:
        """The step's result has come: it took the time since its launch, or since the end of the one before."""
        while self._launched and self._launched[0][0] <= step_id:
            launched_id, num_tokens, num_pairs, has_prefill, began = self._launched.popleft()
            seconds = now - max(began, self._last_end)
            if launched_id == step_id and seconds > 0:
                self.model.observe(num_tokens, num_pairs, has_prefill, seconds)
                if has_prefill:
                    self._most_seen = max(self._most_seen, num_tokens)
        self._last_end = now

    def most_prefill_tokens(self, num_decode: int, num_decode_pairs: float, position: int) -> int:
        """Prompt tokens that may be computed beside `num_decode` running rows; the first has that position."""
        most = max(MIN_PREFILL_TOKENS, _MOST_GROWTH * self._most_seen)
        if self.model.num_prefill_samples < _NUM_TRIALS:
            return min(most, _FIRST_TRIAL_TOKENS)
        a, b, c = self.model.coefficients()
        limit_s = self._limit_s / (1 + 2 * min(self.model.relative_error, 0.5))
        left_s = limit_s - a - b * num_decode - c * num_decode_pairs
        if left_s <= 0:
            return MIN_PREFILL_TOKENS
        linear = b + c * position  # n tokens cost linear * n + c / 2 * n^2
        root = linear + math.sqrt(linear * linear + 2 * c * left_s)
        num_tokens = 2 * left_s / root if root > 0 else math.inf
        return max(MIN_PREFILL_TOKENS, int(min(num_tokens, most)))

    def shares_by_draining(self, num_decode: int, num_decode_pairs: float, most: int) -> tuple[float, float]:
        """What a step of `most` prompt tokens alone before each mixed one changes.

        Returns (share of the time for a prompt token that is saved, share of the time between two tokens of a stream
        that is lost by it). (0, 0): nothing, or not known yet.
        """
        if self.model.num_prefill_samples < _NUM_TRIALS:
            return 0.0, 0.0
        num_mixed = self.most_prefill_tokens(num_decode, num_decode_pairs, 0)
        num_alone = min(most, _MOST_GROWTH * self._most_seen)
        if num_alone <= num_mixed:
            return 0.0, 0.0
        alone_s = self.model.seconds(num_alone, num_alone * num_alone / 2)
        mixed_s = self.model.seconds(num_decode + num_mixed, num_decode_pairs + num_mixed * num_mixed / 2)
        if alone_s <= 0 or mixed_s <= 0:
            return 0.0, 0.0
        per_token_s = (alone_s + mixed_s) / (num_alone + num_mixed)
        return max(1 - per_token_s * num_mixed / mixed_s, 0.0), alone_s / (alone_s + mixed_s)
