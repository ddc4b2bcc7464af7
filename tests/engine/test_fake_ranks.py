"""Ranks on the way of a GPU (captured steps, pinned memory, run-ahead, agreed sizes), on devices that are none."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cb_backend.cli.server.processes import descendants
from cb_backend.engine.llm_engine import create_engine
from cb_backend.engine.runner.ranks import RankedRunner
from cb_backend.engine.runner.step_graphs import StepGraphs
from tests.engine.drive import Run, config, engine_for, run, with_reference_runner
from tests.engine.fake_cuda import FakeCuda, FakeGraph
from tests.engine.fake_device import fake_device
from tests.engine.fake_ranks import use_ranks
from tests.engine.structured import run_to_end
from tests.engine.test_fake_cuda import ARRIVALS, PROMPTS, REQUESTS, SMALL
from tests.engine.test_pooling_captured import ARRIVALS as POOLED_ARRIVALS
from tests.engine.test_pooling_captured import BOTH, KINDS, assert_same
from tests.engine.test_pooling_captured import PROMPTS as POOLED_PROMPTS
from tests.server.conftest import _command_line

RANKED = {**SMALL, "device": "cuda", "tensor_parallel_size": 2, "disable_custom_all_reduce": True}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_device(monkeypatch) as fake:
        use_ranks(monkeypatch)
        yield fake


@pytest.fixture(scope="module")
def expected(folder: Path) -> Run:
    """Of the reference runner on one CPU."""
    return run_to_end(with_reference_runner(config(str(folder), **SMALL)), PROMPTS, REQUESTS)


@pytest.mark.parametrize(
    "settings",
    [{}, {"enforce_eager": True}, {"run_ahead": 0}, {"num_gpu_blocks_override": 40, "swap_space": 0.01}],
    ids=["graphs", "eager", "one by one", "pressed"],
)
def test_ranks_on_devices_answer_as_one_cpu(
    settings: dict[str, Any], folder: Path, expected: Run, fake: FakeCuda
) -> None:
    engine = create_engine(config(str(folder), **{**RANKED, **settings}))
    try:
        runner = engine.runner
        assert isinstance(runner, RankedRunner)
        assert runner.runner.storage.data.is_cuda
        got = run_to_end(engine, PROMPTS, REQUESTS, arrivals=ARRIVALS)
        assert fake.mistakes == []
        assert got.token_ids == expected.token_ids
        assert got.reasons == expected.reasons
        graphs = [graph for graph, _ in runner.runner.graphs._graphs.values()]
        is_captured = "enforce_eager" not in settings
        assert is_captured is any(isinstance(graph, FakeGraph) and graph.num_replays for graph in graphs)
    finally:
        engine.close()


def test_what_pooling_requests_get_is_that_of_one_cpu(folder: Path, fake: FakeCuda) -> None:
    """Steps of means are launched kernel by kernel on all ranks; of the head, which scores need, each has its rows."""
    expected = run(engine_for(folder, "reference", **BOTH), POOLED_PROMPTS, KINDS)
    engine = create_engine(config(str(folder), **RANKED, **BOTH))
    try:
        got = run(engine, POOLED_PROMPTS, KINDS, arrivals=POOLED_ARRIVALS)
        assert fake.mistakes == []
        assert_same(got, expected)
    finally:
        engine.close()


def test_a_rank_that_is_killed_while_graphs_are_captured_is_said(
    folder: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = StepGraphs.capture

    def kill_and_capture(graphs: StepGraphs, *arguments: Any, **options: Any) -> None:
        for process in descendants(os.getpid()):
            if "tests.engine.fake_ranks" in _command_line(process.pid):
                os.kill(process.pid, signal.SIGKILL)
        capture(graphs, *arguments, **options)

    monkeypatch.setattr(StepGraphs, "capture", kill_and_capture)
    with pytest.raises(RuntimeError, match=r"rank 1 .* has ended by signal 9 \(SIGKILL\) while the model was loaded"):
        create_engine(config(str(folder), **RANKED))
    assert not [each for each in descendants(os.getpid()) if "fake_ranks" in _command_line(each.pid)]
