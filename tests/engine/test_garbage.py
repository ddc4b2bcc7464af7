"""When Python's garbage is collected: not while an engine starts, not while it steps."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from cb_backend.contracts.config import EngineConfig
from cb_backend.engine import engine_process
from cb_backend.engine.garbage import GarbageSchedule
from cb_backend.support.collection import no_collection


class Node:
    """Of a circle, which only a collection takes away."""

    def __init__(self) -> None:
        self.other = self


def test_nothing_is_collected_meanwhile_and_then_it_is() -> None:
    with no_collection():
        assert not gc.isenabled()
        circle = weakref.ref(Node())
        kept = [[] for _ in range(100_000)]  # more than a collection waits for
        assert circle() is not None
        assert len(kept) == 100_000
    assert gc.isenabled()
    with GarbageSchedule():
        assert circle() is None
        assert not gc.isenabled()
    assert gc.isenabled()


def test_within_another_it_ends_with_the_outer_one() -> None:
    """As where an engine that starts compiles its kernels."""
    with no_collection():
        with no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_start_that_fails_leaves_it_as_it_was() -> None:
    with pytest.raises(ValueError, match="no model"), no_collection():
        raise ValueError("no model")
    assert gc.isenabled()


def test_an_engine_starts_without_collections(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    seen: list[bool] = []

    def fail(config: EngineConfig, folder: Path, weights: Path | None) -> None:
        seen.append(gc.isenabled())
        raise ValueError("no model")

    monkeypatch.setattr(engine_process, "create_engine", fail)
    monkeypatch.setattr(engine_process, "report_failed_start", lambda *_: None)
    socket = f"{tmp_path}/socket"
    assert engine_process.serve(EngineConfig(model="any"), socket, 1) == engine_process.EXIT_START_FAILED
    assert seen == [False]
    assert gc.isenabled()
