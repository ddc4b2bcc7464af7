"""I11: a stream that needs a block waits for it at most as many steps as the engine runs ahead; who waits is next."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from cb_backend.contracts.scheduling import SchedulingParams
from tests.fakes.engine import FakeEngine


@dataclass
class Launch:
    """Who gets what in a plan: request ids in the queue's order."""

    is_empty: bool
    order: list[int]  # whoever runs
    left_out: list[int]  # streams that wait for a block
    served: list[int]  # streams that get one


def launches(seed: int, run_ahead: int) -> Iterator[Launch]:
    """A small random world, plan by plan."""
    rng = random.Random(seed)
    engine = FakeEngine(
        num_blocks=rng.randint(10, 34), block_size=rng.choice((1, 2)), run_ahead=run_ahead, max_num_seqs=16,
        max_num_batched_tokens=64, enable_prefix_caching=False,
    )  # fmt: skip
    left = [(rng.randint(1, 7), rng.randint(3, 10), rng.choice((0, 0, 0, -1, 1))) for _ in range(12)]
    left = [(prompt, output, priority) for prompt, output, priority in left if prompt + output <= 10]
    for number, (prompt, output, priority) in enumerate(left):
        engine.add(number, prompt, max_tokens=output, scheduling=SchedulingParams(priority=priority))
    while engine.scheduler.has_unfinished():
        for _ in range(run_ahead + 1 - len(engine.in_flight)):
            launched = launch(engine)
            yield launched
            if launched.is_empty:
                break
        if engine.in_flight:
            engine.finish()


def launch(engine: FakeEngine) -> Launch:
    """One more step, if one can be planned."""
    plan, table = engine.launch(), engine.scheduler._table
    planned, grown = (set(), set()) if plan is None else (set(plan.slots.tolist()), set(plan.new_blocks[:, 0].tolist()))
    found = Launch(plan is None, [], [], [])
    for slot in table.order.tolist():
        is_stream = table.num_prefill_tokens[slot] <= table.num_computed_tokens[slot]
        is_owed = is_stream and table.num_computed_tokens[slot] < table.max_computed_tokens[slot]
        number = int(table.request_ids[slot])
        found.order.append(number)
        if is_owed and slot not in planned:
            found.left_out.append(number)
        if slot in grown:
            found.served.append(number)
    return found


def gaps(seed: int, run_ahead: int) -> Counter[int]:
    """Plans that running streams were left out of in a row: how often so many."""
    waited, found = Counter[int](), Counter[int]()
    for plan in launches(seed, run_ahead):
        if not plan.is_empty:
            for number in plan.order:
                waited[number] = waited[number] + 1 if number in plan.left_out else 0
                found[waited[number]] += 1
    return found


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
def test_i11_a_stream_waits_for_a_block_at_most_the_steps_that_were_launched(run_ahead: int) -> None:
    found = Counter[int]()
    for seed in range(100):
        found += gaps(seed, run_ahead)
    assert max(found) <= run_ahead, found
    assert run_ahead == 0 or found[1] > 10, "nobody waited, so nothing was tested"


@pytest.mark.parametrize("run_ahead", [1, 2, 4])
def test_blocks_go_to_those_who_waited_before_and_then_in_the_queues_order(run_ahead: int) -> None:
    num_choices = 0
    for seed in range(100):
        waited: list[int] = []
        for plan in launches(seed, run_ahead):
            turn = {number: (number not in waited, place) for place, number in enumerate(plan.order)}
            for number in plan.served:
                num_choices += len(plan.left_out)
                # Between two who waited it is not the queue's order that counts, but who has waited longer.
                assert number in waited or all(turn[number] < turn[other] for other in plan.left_out)
            waited = plan.left_out
    assert num_choices > 100, "nobody waited, so nothing was tested"
