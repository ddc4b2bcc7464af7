"""Non-negative least squares against its conditions and by hand: pytest tests/scheduler/test_non_negative.py"""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.engine.scheduler import step_time_model
from cb_backend.engine.scheduler.step_time_model import non_negative_solution


def test_nothing_negative_and_nothing_better_nearby() -> None:
    """The conditions of Karush, Kuhn and Tucker, on random problems of which most have a coefficient at zero."""
    rng = np.random.default_rng(0)
    num_bound = 0
    for _ in range(200):
        features, target = rng.normal(size=(30, 6)), rng.normal(size=30)
        matrix, side = features.T @ features, features.T @ target
        found = non_negative_solution(matrix, side)
        slope = matrix @ found - side  # of the error, by coefficient
        assert found.min() >= 0
        assert slope.min() > -1e-8, "a coefficient at zero should be above it"
        assert np.abs(slope[found > 0]).max(initial=0.0) < 1e-8, "a coefficient could be better"
        num_bound += bool((found == 0).any())
    assert num_bound > 100


@pytest.mark.parametrize("share", [0.9, 0.97])
def test_columns_that_are_nearly_the_same(share: float) -> None:
    """Then coefficients come and go on the way, several at a time."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        features = (1 - share) * rng.normal(size=(40, 12)) + share * rng.normal(size=(40, 1))
        target = rng.normal(size=40)
        matrix, side = features.T @ features, features.T @ target
        found = non_negative_solution(matrix, side)
        slope = matrix @ found - side
        assert found.min() >= 0
        assert slope.min() > -1e-7
        assert np.abs(slope[found > 0]).max(initial=0.0) < 1e-7


def test_by_hand() -> None:
    """min (x + y - 1)^2 + (x - 3)^2: freely (3, -2); with y at zero, x is the mean of 1 and 3."""
    features, target = np.array([[1.0, 1.0], [1.0, 0.0]]), np.array([1.0, 3.0])
    assert non_negative_solution(features.T @ features, features.T @ target) == pytest.approx([2.0, 0.0])


def test_what_was_never_seen_costs_nothing() -> None:
    """A column of zeros, as before the first prompt, and two columns that are the same."""
    features = np.array([[1.0, 0.0, 1.0], [2.0, 0.0, 2.0], [3.0, 0.0, 3.0]])
    found = non_negative_solution(features.T @ features, features.T @ np.array([2.0, 4.0, 6.0]))
    assert found[1] == 0
    assert features @ found == pytest.approx([2.0, 4.0, 6.0])
    assert non_negative_solution(np.zeros((3, 3)), np.zeros(3)).tolist() == [0, 0, 0]


def test_what_wants_nothing_negative_is_one_small_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time_model, "_by_active_sets", None)
    assert non_negative_solution(np.eye(2), np.array([2.0, 0.0])).tolist() == [2.0, 0.0]
