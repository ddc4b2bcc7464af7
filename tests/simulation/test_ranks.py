"""Random worlds over two ranks: both run the same, nothing is told of what one of them has not run, and what is broken
between them is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from cb_backend.contracts.step import Copies, StepPlan
from cb_backend.engine.runner import ranks as real_ranks
from cb_backend.engine.runner import step_runner
from cb_backend.engine.runner.input_batch import InputBatch
from cb_backend.engine.runner.ranks import RankedStep
from cb_backend.engine.runner.shard_runner import ShardRunner
from cb_backend.kv_cache.swap import BlockSwapper
from cb_backend.parallel.worker_plan import encode_plan
from tests.simulation.clients import STOP
from tests.simulation.draw import Kind, make_scenario, with_pooling
from tests.simulation.sweep import run_seed
from tests.simulation.world import World

OVER_RANKS = Kind(has_ranks=True)
NUM_WORLDS = 16
SOON = (11, 6, *range(20))  # worlds that lose a rank in time, and that swap, first


def test_two_ranks_agree_and_nothing_runs_without_the_second() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WORLDS):
        seen += run_seed(seed, OVER_RANKS)
    wanted = {
        "over two ranks": NUM_WORLDS, "with a lost rank": 2, "with swap": 2, "with preemption": 5, "ended: length": 30,
        "fault: worker.execute": 2, "chunks": 20,
    }  # fmt: skip
    missing = {name: (seen[name], least) for name, least in wanted.items() if seen[name] < least}
    assert not missing, f"too rare (found, wanted): {missing} of {dict(seen)}"


def test_vectors_over_two_ranks() -> None:
    """A mean's steps are launched in another way on both."""
    seen: Counter[str] = Counter()
    for seed in range(6):
        world = World(with_pooling(make_scenario(seed, OVER_RANKS)))
        world.run()
        seen.update(f"{answer.arrival.pooling} {answer.end}" for answer in world.answers.values())
    assert seen[f"mean {STOP}"] >= 3
    assert seen[f"last {STOP}"] >= 5


def test_a_world_is_as_it_was_without_its_second_rank() -> None:
    """Who is not over two ranks, or loses none, is drawn as before there were any."""
    drawn = [make_scenario(seed) for seed in range(200)]
    over_ranks = [scenario for scenario in drawn if scenario.config.tensor_parallel_size > 1]
    assert 2 <= len(over_ranks) <= 20
    lossless = next(scenario for scenario in over_ranks if scenario.rank_dies_at is None)
    alone = replace(lossless, config=replace(lossless.config, tensor_parallel_size=1))
    if not any(fault.point == "worker.execute" for fault in lossless.faults):
        assert World(alone).run() == World(lossless).run()


def without_copies(plan: StepPlan) -> bytes:
    return encode_plan(msgspec.structs.replace(plan, copies=Copies()))


def misses_new_blocks(plan: StepPlan) -> Any:
    return DELTAS(msgspec.structs.replace(plan, new_blocks=np.empty((0, 3), np.int32)))


def joins_alone(batch: InputBatch, plan: StepPlan) -> None:
    for row in plan.joined:
        batch.join(row)


def keeps_lengths(runner: ShardRunner, *rows: Any) -> None:
    runner.ops.prepare_rows(*rows)


DELTAS = step_runner.block_table_deltas
APART = "the ranks differ"
BROKEN: list[tuple[object, str, Callable[..., Any], str]] = [
    (real_ranks, "encode_plan", without_copies, "the plan of rank 1 is another"),
    (BlockSwapper, "apply", lambda swapper, plan: None, "what it reads"),
    (step_runner, "block_table_deltas", misses_new_blocks, "the block table"),
    (InputBatch, "apply", joins_alone, "the block table"),
    (ShardRunner, "_prepare_shared_rows", keeps_lengths, "the length"),
    (RankedStep, "result", lambda step: step.pending.result(), "of a step that a lost rank has not run"),
]


@pytest.mark.parametrize(("owner", "name", "broken", "told"), BROKEN, ids=[case[1] for case in BROKEN])
def test_what_is_broken_between_them_is_found(
    owner: object, name: str, broken: Callable[..., Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    found = set()
    for seed in SOON:
        try:
            World(make_scenario(seed, OVER_RANKS)).run()
        except AssertionError as error:
            found.add(str(error))
            if told in str(error):
                return
    pytest.fail(f"not found; told was {found}")
