"""Full steps of more than 2,048 prompt tokens: graphs are made of them where launching is what they wait for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.engine.runner import cuda_warm_up
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.step_shapes import StepShape, step_shapes
from cb_backend.parallel.group import Agreed, Group, NoGroup
from tests.engine.drive import config, run
from tests.engine.fake_cuda import FakeCuda, FakeGraph
from tests.engine.fake_device import fake_device

BUDGET = 2176
SETTINGS = {
    "block_size": 16, "max_model_len": 512, "max_num_batched_tokens": BUDGET, "max_num_seqs": 40,
    "num_gpu_blocks_override": 1400, "attention_backend": "torch",
}  # fmt: skip
SHAPE = StepShape(0, 8192, 64)
PARAMS = TokenRules(max_tokens=6, temperature=0.0, seed=0, ignore_eos=True)


class Clock:
    """Time as host and device spend it: `launch_s[n]` for the launches of step n, `device_s` from their start on."""

    def __init__(self, launch_s: list[float], device_s: float) -> None:
        self.now = 0.0
        self._launch_s, self._device_s = launch_s, device_s
        self._is_done_at = 0.0
        self.num_steps = 0

    def run_step(self, buffers: object) -> None:
        self._is_done_at = self.now + self._device_s
        self.now += self._launch_s[min(self.num_steps, len(self._launch_s) - 1)]
        self.num_steps += 1

    def synchronize(self) -> None:
        self.now = max(self.now, self._is_done_at)


@pytest.fixture
def is_launch_bound(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bool, int]]:
    """Whether a step is held for launch bound, and how often it ran to find out."""

    def measure(launch_s: list[float], device_s: float, group: Group | None = None) -> tuple[bool, int]:
        clock = Clock(launch_s, device_s)
        monkeypatch.setattr(torch.cuda, "synchronize", clock.synchronize)
        monkeypatch.setattr(cuda_warm_up, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        model = SimpleNamespace(group=group or NoGroup())
        runner: Any = SimpleNamespace(new_buffers=lambda shape: None, run_step=clock.run_step, model=model)
        return cuda_warm_up._is_launch_bound(runner, SHAPE), clock.num_steps

    return measure


@pytest.mark.parametrize(
    ("launch_s", "device_s", "is_bound", "num_steps"),
    [
        ([0.009], 0.190, False, 1),  # seen at once: such a step takes long
        ([0.006], 0.021, False, 1),
        ([0.008], 0.021, True, 2),
        ([0.021], 0.010, True, 2),
        ([0.500, 0.006], 0.021, False, 2),  # kernels were loaded the first time
        ([0.500, 0.012], 0.021, True, 2),
        ([0.150], 0.160, False, 2),  # the queue of launches is full
    ],
)
def test_a_step_is_launch_bound_where_launching_takes_more_than_a_third_of_it(
    launch_s: list[float],
    device_s: float,
    is_bound: bool,
    num_steps: int,
    is_launch_bound: Callable[..., tuple[bool, int]],
) -> None:
    assert is_launch_bound(launch_s, device_s) == (is_bound, num_steps)


class OtherRank(NoGroup):
    """One of two ranks, of which the other has these values, in this order."""

    size = 2

    def __init__(self, *values: int) -> None:
        self.values = list(values)

    def agree(self, value: int, how: Agreed) -> int:
        return min(value, self.values.pop(0))


def test_ranks_run_as_many_steps_to_find_out_and_find_the_same(
    is_launch_bound: Callable[..., tuple[bool, int]],
) -> None:
    """One that ran a step more would wait in it for ever."""
    bound_here, bound_there = ([0.008], 0.021), ([0.006], 0.021)
    assert is_launch_bound(*bound_here, OtherRank(0, 0)) == (False, 1)
    assert is_launch_bound(*bound_there, OtherRank(1, 0)) == (False, 1)
    assert is_launch_bound(*bound_here, OtherRank(1, 0, 0)) == (False, 2)
    assert is_launch_bound(*bound_here, OtherRank(1, 1, 1)) == (True, 2)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_device(monkeypatch) as fake:
        yield fake


def engine_on_device(folder: Path, is_bound: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLMEngine:
    monkeypatch.setattr(cuda_warm_up, "_is_launch_bound", lambda runner, shape: is_bound)
    return create_engine(config(str(folder), **{**SETTINGS, "device": "cuda", **settings}))


def large_graphs(engine: LLMEngine) -> dict[StepShape, FakeGraph]:
    runner = engine.runner
    assert isinstance(runner, SlotRunner)
    return {shape: graph for shape, (graph, _) in runner.graphs._graphs.items() if shape.is_large}  # type: ignore[misc]


@pytest.mark.parametrize("is_bound", [True, False])
def test_same_tokens_with_and_without_graphs_of_large_steps(
    is_bound: bool, folder: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    reference = create_engine(config(str(folder), **SETTINGS))
    prompts = [rng.integers(3, reference.info.vocab_size, 400).tolist() for _ in range(40)]
    params = [msgspec.structs.replace(PARAMS, max_tokens=1 + index % 3) for index in range(len(prompts))]
    expected = run(reference, prompts, params)
    engine = engine_on_device(folder, is_bound, monkeypatch)
    fake.waits.clear()  # a start may wait
    got = run(engine, prompts, params)
    assert got.token_ids == expected.token_ids
    assert (fake.waits, fake.mistakes) == ([], [])
    graphs = large_graphs(engine)
    if is_bound:
        assert set(graphs) == {shape for shape in step_shapes(40, BUDGET) if shape.is_large}
        assert sum(graph.num_replays for graph in graphs.values()) >= 4
        assert sum(graph.num_replays for graph in fake.graphs) >= got.num_steps - 2, "all but lesser steps are replays"
    else:
        assert not graphs


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"max_num_batched_tokens": 2048}])
def test_nothing_is_measured_where_there_is_no_choice(
    settings: dict[str, Any], folder: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(runner: SlotRunner, shape: StepShape) -> bool:
        raise AssertionError("a step was measured")

    monkeypatch.setattr(cuda_warm_up, "_is_launch_bound", refuse)
    engine = create_engine(config(str(folder), **{**SETTINGS, "device": "cuda", **settings}))
    assert not large_graphs(engine)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device whose largest step takes a GiB; `free` bytes are left for cache and steps, `asked` is what they get."""
    memory = SimpleNamespace(free=1 << 40, asked=[])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 3 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 2 << 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 5 << 30)  # holes that packing left

    def size_kv_cache(config: object, layout: object, device: object, step_bytes: int) -> int:
        if step_bytes > memory.free:
            raise ConfigError("not enough memory for the KV cache")
        memory.asked.append(step_bytes)
        return 100

    monkeypatch.setattr(cuda_warm_up, "size_kv_cache", size_kv_cache)
    return memory


@pytest.mark.parametrize(("is_bound", "num_steps"), [(True, 2), (False, 1)])
def test_the_cache_leaves_room_for_the_pool_of_large_graphs(
    is_bound: bool,
    num_steps: int,
    folder: Path,
    fake: FakeCuda,
    memory: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine_on_device(folder, is_bound, monkeypatch)
    assert memory.asked == [(num_steps << 30) + cuda_warm_up.GRAPH_MEMORY]


def test_a_cache_that_leaves_no_room_for_large_graphs_goes_without(
    folder: Path,
    fake: FakeCuda,
    memory: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It fits as it did before there were such graphs; other graphs are made, and the log says what is not."""
    memory.free = (1 << 30) + cuda_warm_up.GRAPH_MEMORY
    engine = engine_on_device(folder, True, monkeypatch)
    assert not large_graphs(engine)
    assert len(fake.graphs) == len([shape for shape in step_shapes(40, BUDGET) if not shape.is_large])
    assert memory.asked == [memory.free]
    assert "no memory for graphs of full steps beside 99 blocks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("there", "num_blocks", "has_large"),
    [((80,), 80, True), ((200,), 100, True), ((0, 90), 90, False), ((0, 200), 100, False)],
)
def test_ranks_have_the_same_cache_and_the_same_graphs(
    there: tuple[int, ...], num_blocks: int, has_large: bool, memory: SimpleNamespace
) -> None:
    """What the one with the least memory has room for; here there are 100 blocks beside any graphs."""
    settings = config("any", **SETTINGS)
    shapes = step_shapes(40, BUDGET)
    arguments: Any = (settings, None, torch.device("cuda"), OtherRank(*there), shapes, 1 << 30)
    found, kept = cuda_warm_up._size_cache(*arguments)
    assert found == num_blocks
    assert kept == [shape for shape in shapes if has_large or not shape.is_large]
    assert any(shape.is_large for shape in shapes)


def test_a_cache_that_does_not_fit_beside_one_step_is_refused(
    folder: Path, fake: FakeCuda, memory: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.free = 1 << 30
    with pytest.raises(ConfigError, match="not enough memory"):
        engine_on_device(folder, True, monkeypatch)


def test_a_line_of_the_log_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts the lines of several ranks, which share the log, would run into one another."""
    written: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    cuda_warm_up.log("rank 1: ready")
    assert written == ["cb_backend engine: rank 1: ready\n"]
