"""Least squares with coefficients that are not below zero: times do not shrink because there is more to do.

Both fits of step times solve theirs here, from the normal equations, so that a fit that forgets need not keep its
samples. It does not know what is fitted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_AT_REST = 1e-10  # of the largest right-hand side: a gradient below it is none
_ZERO = 1e-15


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
            solution[~is_free] = 0.0
    return solution


def _solved(matrix: Floats, side: Floats) -> Floats:
    """The shortest solution where there are several."""
    return np.linalg.lstsq(matrix, side, rcond=None)[0]
