"""Requests whose grammar is being compiled: they wait without a slot, and can end meanwhile."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cb_backend.contracts.errors import InvalidRequestError, UnavailableError
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.structured_output import StructuredOutput
from cb_backend.engine.grammar import grammar_wait
from cb_backend.engine.grammar.grammar_compiler import Grammar, GrammarCompiler
from cb_backend.support import fault_points
from tests.engine.structured import GRAMMARS, engine_for, params


class Slow(GrammarCompiler):
    """Compiles when the test says so."""

    def __init__(self) -> None:
        super().__init__("", 1, (0,))
        self.pending: list[Future[Grammar]] = []

    def compile(self, structured: StructuredOutput) -> Future[Grammar]:
        self.pending.append(Future())
        return self.pending[-1]


def held_engine(folder: Path, **settings: Any) -> tuple[Any, Slow, list[float]]:
    clock = [0.0]
    engine = engine_for(folder, "slots", run_ahead=1, max_num_seqs=2, **settings)
    slow = Slow()
    engine._clock = lambda: clock[0]
    engine.grammars = slow
    return engine, slow, clock


def add(engine: Any, request_id: int, structured: StructuredOutput | None, **scheduling: Any) -> None:
    own = params(structured, max_tokens=30, ignore_eos=structured is None)
    engine.add_request(
        engine.make_request(request_id, np.array([5, 6, 7], np.int32), own, SchedulingParams(**scheduling))
    )


def test_i17_a_request_that_could_not_be_queued_is_not_waited_for(folder: Path) -> None:
    engine, _, _ = held_engine(folder)

    def fail(point: str) -> None:
        if point == "scheduler.add_request":
            raise RuntimeError(point)

    with fault_points.armed(fail), pytest.raises(RuntimeError):
        add(engine, 1, GRAMMARS["choice"])
    assert not engine.is_holding
    assert not engine.has_unfinished()


def test_waiting_for_a_grammar_holds_neither_slot_nor_blocks(folder: Path, compiler: GrammarCompiler) -> None:
    engine, slow, _ = held_engine(folder)
    add(engine, 1, GRAMMARS["choice"])
    assert engine.is_holding and engine.has_unfinished() and engine.step() is None  # noqa: PT018 one state
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 1)
    assert engine.stats().num_free_blocks == engine.info.num_blocks
    add(engine, 2, None)
    add(engine, 3, None)
    while len(ended := [rid for rid in (2, 3) if rid not in engine.scheduler._table.by_id]) < 2:
        engine.step()
        assert ended is not None
        engine.scheduler.check_integrity()
    slow.pending[0].set_result(compiler.compile(GRAMMARS["choice"]).result())
    assert engine.release_held() == []
    while engine.has_unfinished():
        engine.step()
    assert not engine.is_holding


def test_cancel_and_timeout_while_compiling(folder: Path, compiler: GrammarCompiler) -> None:
    engine, slow, clock = held_engine(folder)
    add(engine, 1, GRAMMARS["choice"])
    add(engine, 2, GRAMMARS["choice"], queue_timeout_ms=500)
    add(engine, 3, GRAMMARS["choice"])
    assert engine.cancel(1)
    clock[0] = 1.0
    assert [request_id for request_id, _ in engine.expire()] == [2]
    for future in slow.pending[:2]:
        future.set_result(compiler.compile(GRAMMARS["choice"]).result())
    assert engine.release_held() == []
    assert engine.scheduler.num_waiting == 1
    clock[0] = grammar_wait.COMPILE_TIMEOUT_S + 1.1
    ((request_id, error),) = engine.release_held()
    assert request_id == 3
    assert "was not compiled within 30 s" in str(error)
    assert not engine.has_unfinished()
    engine.scheduler.check_integrity()


def test_a_refusal_while_waiting_and_at_once(folder: Path, compiler: GrammarCompiler) -> None:
    engine, slow, _ = held_engine(folder)
    unclosed = StructuredOutput(kind="regex", text="(")
    add(engine, 1, unclosed)
    refused = compiler.compile(unclosed)
    slow.pending[0].set_exception(refused.exception())
    ((request_id, error),) = engine.release_held()
    assert request_id == 1
    assert "unclosed group" in str(error)
    engine.grammars = compiler  # which has been asked before, and is done
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        add(engine, 2, unclosed)
    assert not engine.has_unfinished()


def test_held_requests_count_for_the_queue(folder: Path) -> None:
    engine, _, _ = held_engine(folder, max_queue_size=1)
    for request_id in range(3):  # two slots, one place
        add(engine, request_id, GRAMMARS["regex"])
    with pytest.raises(UnavailableError, match="the queue is full"):
        add(engine, 3, GRAMMARS["regex"])
    assert engine.scheduler.num_waiting == 3
