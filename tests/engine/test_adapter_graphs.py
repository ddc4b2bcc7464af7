"""Captured steps of rows that go through adapters: whatever is in a slot when a graph is replayed is what counts.

On a CUDA device that is none; what is computed is compared with an engine on the CPU, which captures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.runner.ranks import RankedRunner
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.runner.step_graphs import StepGraphs
from cb_backend.engine.step_shapes import FullSteps, StepShape, adapter_shapes, step_shapes
from tests.engine.adapted import adapted_engine, source_of
from tests.engine.drive import Run, run
from tests.engine.fake_cuda import FakeCuda
from tests.engine.fake_device import fake_device
from tests.engine.fake_ranks import use_ranks
from tests.fakes.graphs import graphs_of
from tests.models.adapters import ALL_MODULES, write_adapter

SETTINGS = {
    "max_model_len": 128, "max_num_batched_tokens": 512, "max_num_seqs": 4, "num_gpu_blocks_override": 200,
    "attention_backend": "torch", "max_loras": 2, "enable_prefix_caching": False,
}  # fmt: skip
GREEDY = TokenRules(max_tokens=9, temperature=0.0, ignore_eos=True, seed=0)
PROMPTS = [[(7 * index + place) % 90 + 3 for place in range(5 + index)] for index in range(6)]
# Which adapter each prompt wants, None: none. There are two slots: graphs meet other mixes, other contents, neither.
BASE = (None,) * 6
ROUNDS: list[tuple[int | None, ...]] = [
    (0, 1, None, 0, 1, 1),
    (1, None, 0, 1, 0, 0),
    (2, None, 0, 2, 0, 0),
    BASE,
    (1, 1, 1, 1, 1, 1),
    (2, 1, 0, None, 2, 0),
]


@pytest.fixture(scope="module")
def adapters(gqa_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(gqa_folder, made / str(rank), seed=rank, r=rank, lora_alpha=2 * rank, target_modules=ALL_MODULES)
        for rank in (1, 3, 8)
    ]


def rounds(
    folder: Path, adapters: list[Path], numbers: Sequence[int] = range(len(ROUNDS)), **settings: Any
) -> tuple[list[Run], LLMEngine, list[list[int]]]:
    """(what each round gave, the engine, replays of each graph in each round)."""
    engine = adapted_engine(folder, **{**SETTINGS, **settings})
    runner = engine.runner.runner if isinstance(engine.runner, RankedRunner) else engine.runner
    captured = runner.graphs._graphs.values() if isinstance(runner, SlotRunner) else ()
    graphs: list[Any] = [graph for graph, _ in captured]
    runs, replays = [], []
    for wanted in (ROUNDS[number] for number in numbers):
        before = [graph.num_replays for graph in graphs]
        sources = {index: source_of(adapters[each]) for index, each in enumerate(wanted) if each is not None}
        runs.append(run(engine, PROMPTS, GREEDY, adapters=sources))
        replays.append([graph.num_replays - count for graph, count in zip(graphs, before, strict=True)])
    return runs, engine, replays


@pytest.fixture(scope="module")
def expected(gqa_folder: Path, adapters: list[Path]) -> list[Run]:
    """Of an engine that captures nothing."""
    runs, _, _ = rounds(gqa_folder, adapters, kind="reference")
    answers = [each.token_ids for each in runs]
    assert all(first != second for first in answers for second in answers if first is not second), "rounds are alike"
    return runs


@pytest.fixture
def fake(expected: list[Run], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_device(monkeypatch) as fake:
        yield fake


def test_replays_follow_the_adapters_that_are_there_then(
    gqa_folder: Path, adapters: list[Path], expected: list[Run], fake: FakeCuda
) -> None:
    runs, engine, replays = rounds(gqa_folder, adapters, device="cuda")
    assert isinstance(engine.runner, SlotRunner)
    assert [each.token_ids for each in runs] == [each.token_ids for each in expected]
    is_of_adapters = [shape.has_adapters for shape in engine.runner.graphs.shapes]
    for wanted, counts in zip(ROUNDS, replays, strict=True):
        used = {has for has, count in zip(is_of_adapters, counts, strict=True) if count}
        if wanted is BASE:
            assert used == {False}, "no graph of steps with adapters runs where no row has one"
        else:
            assert True in used
    assert fake.mistakes == []


def test_nothing_waits_for_adapters(gqa_folder: Path, adapters: list[Path], fake: FakeCuda) -> None:
    """Loads are copies in order with the steps."""
    engine = adapted_engine(gqa_folder, **{**SETTINGS, "device": "cuda"})
    fake.waits.clear()
    for wanted in ROUNDS[:3]:
        sources = {index: source_of(adapters[each]) for index, each in enumerate(wanted) if each is not None}
        run(engine, PROMPTS, GREEDY, adapters=sources)
    assert (fake.waits, fake.mistakes) == ([], [])


def test_launched_kernel_by_kernel_it_is_the_same(
    gqa_folder: Path, adapters: list[Path], expected: list[Run], fake: FakeCuda
) -> None:
    runs, _, _ = rounds(gqa_folder, adapters, device="cuda", enforce_eager=True)
    assert [each.token_ids for each in runs] == [each.token_ids for each in expected]
    assert fake.graphs == []


def test_ranks_replay_what_is_in_their_places(
    gqa_folder: Path, adapters: list[Path], expected: list[Run], fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has its share of what the plan loads; nothing waits for its way there."""
    use_ranks(monkeypatch)
    ranked = {"device": "cuda", "tensor_parallel_size": 2, "disable_custom_all_reduce": True}
    numbers = (0, 2, 3)
    runs, engine, replays = rounds(gqa_folder, adapters, numbers, **ranked)
    try:
        assert [each.token_ids for each in runs] == [expected[number].token_ids for number in numbers]
        assert isinstance(engine.runner, RankedRunner)
        assert engine.runner.adapters is not None
        is_of_adapters = [shape.has_adapters for shape in engine.runner.runner.graphs.shapes]
        for number, counts in zip(numbers, replays, strict=True):
            used = {has for has, count in zip(is_of_adapters, counts, strict=True) if count}
            assert (True in used) is (ROUNDS[number] is not BASE)
        table = engine.runner.adapters.table
        assert table.slab.is_cuda
        assert table.bytes_per_adapter < table.whole.bytes_per_adapter
        assert fake.mistakes == []
        assert not [site for site in fake.waits if "adapter" in site]
    finally:
        engine.close()


def both_families(max_num_seqs: int, budget: int) -> StepGraphs:
    graphs = graphs_of(max_num_seqs, budget)
    for shape in adapter_shapes(max_num_seqs, budget):
        buffers: Any = type("Buffers", (), {"shape": shape})()
        graphs.add(shape, graphs.find(1, 0, 0)[0], buffers)  # type: ignore[index]
    return graphs


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(256, 2048), (64, 512), (512, 8192), (8, 512), (300, 1300)])
def test_steps_of_each_family_find_graphs_of_their_own(max_num_seqs: int, budget: int) -> None:
    graphs, full_steps = both_families(max_num_seqs, budget), FullSteps(max_num_seqs, budget)
    assert len({*adapter_shapes(max_num_seqs, budget)}) == len(adapter_shapes(max_num_seqs, budget))
    for num_decode in range(1, max_num_seqs + 1):
        found = graphs.find(num_decode, 0, 0, has_adapters=True)
        assert found is not None
        assert found[1].shape.has_adapters
        most = full_steps.most_prompt_tokens(num_decode)
        full = graphs.find(num_decode, most, 1, has_adapters=True)
        assert most == 0 or full is None or full[1].shape.has_adapters
        if budget <= 2048 and most:
            assert full is not None, f"a full step of {num_decode} rows has no graph"
            own = graphs.find(num_decode, most, 1)
            assert own is None or full[1].shape.num_tokens <= own[1].shape.num_tokens, "it computes no more padding"
        base = graphs.find(num_decode, 0, 0)
        assert base is not None
        assert not base[1].shape.has_adapters


def test_x1_shapes_without_adapters_are_what_they_were() -> None:
    """And those with adapters are few."""
    shapes = step_shapes(256, 2048)
    assert not any(shape.has_adapters for shape in shapes)
    assert len(adapter_shapes(256, 2048)) <= 40
    assert len(shapes) > 2 * len(adapter_shapes(256, 2048)), "the start takes little longer"
    assert StepShape(256, has_adapters=True) in adapter_shapes(256, 2048)
