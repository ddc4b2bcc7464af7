"""kernels/adapter_places.py: what few places for many adapters allow."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from cb_backend.cli.paths import checkout_path


@pytest.fixture
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import adapter_places

    return adapter_places


def test_with_a_place_for_each_nobody_waits(arithmetic: ModuleType) -> None:
    assert arithmetic.least_waiting(arithmetic.shares(8, 1.0), 8) == 0.0


def test_names_asked_for_alike_have_places_for_equal_shares_of_the_time(arithmetic: ModuleType) -> None:
    """A quarter each: without one for three answers' times, in which three quarters of its requests come."""
    present = arithmetic.best_presence(arithmetic.shares(32, 0.0), 8)
    np.testing.assert_allclose(present, 0.25)
    assert arithmetic.least_waiting(arithmetic.shares(32, 0.0), 8) == pytest.approx(0.75 * 3 / 2)


def test_no_other_division_of_the_places_makes_fewer_wait(arithmetic: ModuleType) -> None:
    share = arithmetic.shares(12, 1.0)
    best = arithmetic.best_presence(share, 4)
    assert best.sum() == pytest.approx(4)
    draw = np.random.default_rng(0)
    for _ in range(200):
        other = best * (1 + 0.2 * draw.random(12))
        other = np.minimum(other * 4 / other.sum(), 1.0)
        assert (share * (1 - other) ** 2 / (2 * other)).sum() >= arithmetic.least_waiting(share, other.sum()) - 1e-9


def test_tokens_are_those_of_the_streams_that_do_not_wait(arithmetic: ModuleType) -> None:
    def step_s(rows: float) -> float:
        return 0.005

    alone = arithmetic.most_tokens(64, 0.0, 100, step_s, 1e-9)
    assert alone == pytest.approx(64 / 0.005, rel=1e-3)
    assert arithmetic.most_tokens(64, 1.0, 100, step_s, 1e-9) == pytest.approx(alone / 2, rel=1e-3)
