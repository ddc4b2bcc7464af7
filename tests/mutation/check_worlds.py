"""Simulated worlds for the mutation run: collected only when it names this file."""

from __future__ import annotations

import pytest

from tests.simulation.sweep import run_seed


@pytest.mark.parametrize("first", range(0, 120, 10))
def test_worlds(first: int) -> None:
    for seed in range(first, first + 10):
        run_seed(seed)
