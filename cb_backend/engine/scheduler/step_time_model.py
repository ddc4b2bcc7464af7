"""How long a step takes, by least squares: seconds = a + b * tokens + c * attention pairs.

An attention pair is one computed token looking at one token before it, so that c stands for the length of contexts.
The fit is over the last hundred or so steps of two kinds, kept apart so that a long time of decoding does not make what
is known of prompts fade. Coefficients are not below zero: times do not shrink because there is more to do. They are
found from the normal equations (`non_negative_solution`, which knows nothing of steps), so that a fit that forgets need
not keep its samples. This module knows neither plans nor clocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_TRIALS = 4  # steps with prompts before the fit is asked
_FORGETTING = 0.99
_MOST_OUTLIER = 3.0  # times the expected seconds: more (a pause of the host) counts as so much
_SCALE = np.array([1.0, 1e-3, 1e-6])  # of the features, so that the normal equations are well conditioned

_AT_REST = 1e-10  # of the largest right-hand side: a gradient below it is none
_ZERO = 1e-15

Floats = NDArray[np.float64]


class StepTimeModel:
    """Least squares with forgetting. Coefficients are never negative."""

    def __init__(self) -> None:
        # Of steps without and with prompts: normal matrix [3, 3] and right-hand side [3].
        self._matrices = np.zeros((2, 3, 3))
        self._sides = np.zeros((2, 3))
        self._coefficients: NDArray[np.float64] | None = None
        self.num_prefill_samples = 0
        self.relative_error = 0.2  # moving average

    def observe(self, num_tokens: Floats, num_pairs: Floats, has_prefill: NDArray[np.bool_], seconds: Floats) -> None:
        """Some steps, oldest first, took so long. Arrays [num_steps].

        What is out of the ordinary is judged by what was known before the first of them.
        """
        if self.num_prefill_samples >= NUM_TRIALS:
            a, b, c = self.coefficients()
            expected = a + b * num_tokens + c * num_pairs
            is_known = expected > 0
            seconds = np.where(is_known, np.minimum(seconds, _MOST_OUTLIER * expected), seconds)
            for error in (np.abs(seconds - expected)[is_known] / expected[is_known]).tolist():
                self.relative_error += 0.02 * (error - self.relative_error)
        features = np.stack([np.ones(len(seconds)), num_tokens, num_pairs], axis=1) * _SCALE  # [num_steps, 3]
        for kind, is_own in enumerate((~has_prefill, has_prefill)):
            own, weights = features[is_own], _FORGETTING ** np.arange(np.count_nonzero(is_own) - 1, -1, -1)
            kept = _FORGETTING ** len(own)
            self._matrices[kind] = kept * self._matrices[kind] + (own.T * weights) @ own
            self._sides[kind] = kept * self._sides[kind] + own.T @ (weights * seconds[is_own])
        self.num_prefill_samples += int(np.count_nonzero(has_prefill))
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


def non_negative_solution(matrix: Floats, side: Floats) -> Floats:
    """The x >= 0 [n] with the least |A x - b|, from `matrix` = A'A [n, n] and `side` = A'b [n].

    Columns of A should be of about the same length. Where several x are equally good, one of them. Without a
    coefficient that wants to be negative this is one small solve; else active sets (Lawson and Hanson, 1974).
    """
    solution = _solved(matrix, side)
    return solution if solution.min(initial=0.0) >= 0.0 else _by_active_sets(matrix, side)


def _by_active_sets(matrix: Floats, side: Floats) -> Floats:
    count = len(side)
    solution = np.zeros(count)
    is_free = np.zeros(count, np.bool_)
    tolerance = _AT_REST * max(float(np.abs(side).max(initial=0.0)), 1e-300)
    for _ in range(10 * count):
        gradient = np.where(is_free, -np.inf, side - matrix @ solution)
        if gradient.max(initial=-np.inf) <= tolerance:
            break
        is_free[gradient.argmax()] = True
        while True:
            trial = np.zeros(count)
            trial[is_free] = _solved(matrix[np.ix_(is_free, is_free)], side[is_free])
            is_below = is_free & (trial <= 0)
            if not is_below.any():
                solution = trial
                break
            # As far towards the trial as no coefficient goes below zero; those that reach it are fixed there.
            step = float(np.min(solution[is_below] / (solution[is_below] - trial[is_below])))
            solution = solution + step * (trial - solution)
            is_free &= solution > _ZERO
    return solution


def _solved(matrix: Floats, side: Floats) -> Floats:
    """The shortest solution where there are several."""
    return np.linalg.lstsq(matrix, side, rcond=None)[0]
