"""Random worlds in which some requests want vectors and others tokens: every invariant holds for both."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cb_backend.contracts.request import Request
from tests.simulation.clients import STOP
from tests.simulation.draw import make_scenario, with_pooling
from tests.simulation.world import World

NUM_WORLDS = 60


def test_vectors_are_those_of_the_lone_run_whatever_happens_beside() -> None:
    """The "vector" is the hash of every cell that was read: a wrong, stale or foreign block is a wrong number."""
    seen: Counter[str] = Counter()
    for seed in range(NUM_WORLDS):
        world = World(with_pooling(make_scenario(seed)))
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"world {seed}: {error}") from error
        streams = [answer for answer in world.answers.values() if answer.arrival.pooling is None]
        for request_id, answer in world.answers.items():
            if answer.arrival.pooling is None:
                continue
            request = world.life.engine.requests.get(request_id)
            seen[f"pooled: {answer.end}"] += 1
            if request is None or answer.end != STOP:
                continue
            seen[f"given: {answer.arrival.pooling}"] += 1
            seen["given with a cached prefix"] += request.num_cached_tokens > 0
            seen["given beside streams"] += any(other.token_ids for other in streams)
    wanted = {
        "given: last": 100, "given: mean": 50, "given with a cached prefix": 15, "given beside streams": 100,
        "pooled: cancelled": 5, "pooled: unavailable": 10,
    }  # fmt: skip
    missing = {name: (seen[name], least) for name, least in wanted.items() if seen[name] < least}
    assert not missing, f"too rare (found, wanted): {missing} of {dict(seen)}"


def test_a_mean_that_read_the_cache_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "may_read_cache", property(lambda request: True))
    told = {_failure_of(seed) for seed in range(20)}
    assert "a mean lacks the states of some tokens" in told


def _failure_of(seed: int) -> str:
    try:
        World(replace(with_pooling(make_scenario(seed)), faults=())).run()
    except AssertionError as error:
        return str(error)
    return ""
