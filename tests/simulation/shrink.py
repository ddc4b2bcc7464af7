"""A failing scenario made small: as few requests, tokens and peculiarities as still break the same thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.scheduling import SchedulingParams
from tests.simulation.scenario import Arrival, Scenario
from tests.simulation.world import World

CASES = Path(__file__).parent / "cases"
Fails = Callable[[Scenario], "str | None"]

_PLAIN = {
    "max_itl_ms": None, "queue_timeout_ms": None, "timeout_ms": None, "run_ahead": 0,
    "enable_prefix_caching": False, "enable_chunked_prefill": True, "reserved_share": 0.0, "prefill_policy": "mixed",
    "max_queue_size": 1000, "max_queue_tokens": 1 << 24, "priority_aging_s": 10.0, "admission_reserve": 0.5,
}  # fmt: skip


def failure_of(scenario: Scenario) -> str | None:
    """The kind of what breaks: the error's type and its first word, which is the invariant's number; None: nothing."""
    try:
        World(scenario).run()
    except Exception as error:
        return f"{type(error).__name__} {str(error).split(' ')[0]}"
    return None


def shrink(scenario: Scenario, fails: Fails = failure_of, most_runs: int = 2000) -> Scenario:
    """Drop and shorten whatever can go while the scenario fails in the same way. Raises `ValueError` if it does not."""
    kind = fails(scenario)
    if kind is None:
        raise ValueError("the scenario does not fail, so there is nothing to shrink")
    num_runs, is_smaller = 0, True
    while is_smaller and num_runs < most_runs:
        is_smaller = False
        for candidate in _smaller(scenario):
            num_runs += 1
            if fails(candidate) == kind:
                scenario, is_smaller = candidate, True
                break
            if num_runs >= most_runs:
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Candidates, the boldest first."""
    arrivals = scenario.arrivals
    size = len(arrivals) // 2
    while size:
        for first in range(0, len(arrivals), size):
            if len(arrivals) > size:
                yield replace(scenario, arrivals=arrivals[:first] + arrivals[first + size :])
        size //= 2
    for name in ("faults", "engine_dies_at", "front_end_dies_at", "resets_cache_at", "rank_dies_at"):
        if getattr(scenario, name):
            yield replace(scenario, **{name: () if name == "faults" else None})
    for index in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:index] + scenario.faults[index + 1 :])
    for name, value in _PLAIN.items():
        if getattr(scenario.config, name) != value:
            try:
                yield replace(scenario, config=replace(scenario.config, **{name: value}))
            except ConfigError:
                continue  # not together with the rest
    for name in ("num_host_blocks", "stop_chance", "is_delayed", "is_static"):
        if getattr(scenario, name):
            yield replace(scenario, **{name: type(getattr(scenario, name))(0)})
    for index, arrival in enumerate(arrivals):
        for smaller in _smaller_arrivals(arrival):
            yield replace(scenario, arrivals=(*arrivals[:index], smaller, *arrivals[index + 1 :]))


def _smaller_arrivals(arrival: Arrival) -> Iterator[Arrival]:
    for length in (1, len(arrival.prompt) // 2, len(arrival.prompt) - 1):
        if 1 <= length < len(arrival.prompt):
            yield replace(arrival, prompt=arrival.prompt[:length])
    params = arrival.params
    for count in (1, params.most_tokens // 2, params.most_tokens - 1):
        if 1 <= count < params.most_tokens:
            smaller = msgspec.structs.replace(params, max_tokens=count, min_tokens=min(params.min_tokens, count))
            yield replace(arrival, params=smaller)
    for change in ({"stop_token_ids": ()}, {"stop": ()}, {"min_tokens": 0}, {"structured_output": None}):
        if any(getattr(params, name) for name in change):
            yield replace(arrival, params=msgspec.structs.replace(params, **change))
    if arrival.scheduling != SchedulingParams():
        yield replace(arrival, scheduling=SchedulingParams())
    for name in ("fails_at", "cancel_at", "cancel_in"):
        if getattr(arrival, name) is not None:
            yield replace(arrival, **{name: None})
    if arrival.at_step:
        yield replace(arrival, at_step=0)


def keep(scenario: Scenario, folder: Path = CASES) -> Path:
    """Write the scenario as a permanent case, which the suite replays; returns its path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"seed-{scenario.seed}.json"
    scenario.save(path)
    assert isinstance(Scenario.load(path).config, EngineConfig)
    return path
