"""What a soak judges by: a growing figure must be found, a flat one passed, a starved request named."""

from __future__ import annotations

import random

import pytest

from tests.faults import patience
from tests.faults.flatness import Figure, Series, shared_memory_figure, table
from tests.faults.history import Event
from tests.faults.processes import Held

TIMES = [2.0 * i for i in range(300)]  # ten minutes


def memory(growth_mb_per_hour: float, noise_mb: float = 0.2, seed: int = 0) -> Figure:
    rng = random.Random(seed)
    values = [100 + growth_mb_per_hour * t / 3600 + rng.gauss(0, noise_mb) for t in TIMES]
    return Figure("engine", "memory MB", TIMES, values, per_hour=2.0, slack=3.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_told_from_noise(seed: int) -> None:
    assert memory(0.0, seed=seed).is_flat
    assert memory(10.0, seed=seed).is_flat, "less than an allocator may take in so short a time"
    assert not memory(40.0, seed=seed).is_flat
    assert memory(40.0, noise_mb=50.0, seed=seed).slope[1] > 10, "nothing can be said"


def test_the_bound_is_tighter_the_longer_the_run() -> None:
    short = Figure("engine", "memory MB", [0.0, 600.0], [0.0, 0.0], per_hour=2.0, slack=3.0)
    assert short.bound == pytest.approx(2.0 + 18.0)
    assert Figure("engine", "memory MB", [0.0, 36000.0], [0.0, 0.0], 2.0, 3.0).bound == pytest.approx(2.3)


def test_files_threads_and_shared_memory_are_in_the_table() -> None:
    leaking = Series("front end 0", TIMES, [Held(30.0, 16 + i // 10, 18) for i in range(300)])
    figures = [*leaking.figures(), shared_memory_figure(TIMES, [2.0 + 0.01 * i for i in range(300)])]
    lines = list(table(figures))
    assert [line[:2] for line in lines] == ["  ", "  ", "! ", "  ", "! "]
    assert [name in line for name, line in zip(("memory", "files", "threads", "shared"), lines[1:], strict=True)]
    assert "bound" in lines[0]
    assert lines[2].endswith("GROWS")
    assert lines[1].endswith("flat")


def test_too_few_measurements_are_no_verdict() -> None:
    (line,) = list(table([Figure("engine", "files", TIMES[:2], [1.0, 1.0], 0.0, 4.0)]))[1:]
    assert line.startswith("! engine")
    assert "run for longer" in line


def one(name: str, sent: float, first: float) -> list[Event]:
    return [
        Event(sent, name, "send", role="load", item=0),
        Event(first, name, "delta", "a"),
        Event(first + 1, name, "delta", "b"),
        Event(first + 4, name, "final", "c", "length"),
    ]


def test_a_request_that_all_others_pass_is_named() -> None:
    events = [event for i in range(10) for event in one(f"a-{i}", float(i), i + 0.5)]
    assert not [line for line in patience.report(events, 2) if line.startswith("!")]
    starved = one("a-starved", 0.2, 20.0)
    bad = [line for line in patience.report([*events, *starved], 2) if line.startswith("!")]
    assert bad == ["! a-starved was passed by 9 requests before its first text; at most 4 may"]
    found = {wait.request: wait for wait in patience.waits([*events, *starved])}
    assert found["a-starved"].first - found["a-starved"].sent == pytest.approx(19.8)
    assert found["a-0"].longest_silence_s == 3.0
    assert list(patience.report([], 2)) == ["! no request got any text"]
