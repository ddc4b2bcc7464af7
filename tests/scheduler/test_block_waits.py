"""I11: a stream that needs a block waits for it at most as many steps as the engine runs ahead."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cb_backend.scheduling_params import SchedulingParams
from tests.fakes.engine import FakeEngine


def gaps(seed: int, run_ahead: int) -> Counter[int]:
    """Plans that running streams were left out of in a row, in a small random world: how often so many."""
    rng = random.Random(seed)
    engine = FakeEngine(
        num_blocks=rng.randint(10, 34), block_size=rng.choice((1, 2)), run_ahead=run_ahead, max_num_seqs=16,
        max_num_batched_tokens=64, enable_prefix_caching=False,
    )  # fmt: skip
    left = [(rng.randint(1, 7), rng.randint(3, 10), rng.choice((0, 0, 0, -1, 1))) for _ in range(12)]
    left = [(prompt, output, priority) for prompt, output, priority in left if prompt + output <= 10]
    for number, (prompt, output, priority) in enumerate(left):
        engine.add(number, prompt, max_tokens=output, scheduling=SchedulingParams(priority=priority))
    table, waited, found = engine.scheduler._table, Counter[int](), Counter[int]()
    while engine.scheduler.has_unfinished():
        for _ in range(run_ahead + 1 - len(engine.in_flight)):
            plan = engine.launch()
            if plan is None:
                break
            planned = set(plan.slots.tolist())
            for slot in table.order.tolist():
                is_stream = table.num_prefill_tokens[slot] <= table.num_computed_tokens[slot]
                is_owed = is_stream and table.num_computed_tokens[slot] < table.max_computed_tokens[slot]
                number = int(table.request_ids[slot])
                waited[number] = 0 if slot in planned or not is_owed else waited[number] + 1
                found[waited[number]] += 1
        if engine.in_flight:
            engine.finish()
    return found


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
def test_i11_a_stream_waits_for_a_block_at_most_the_steps_that_were_launched(run_ahead: int) -> None:
    found = Counter[int]()
    for seed in range(100):
        found += gaps(seed, run_ahead)
    assert max(found) <= run_ahead, found
    assert run_ahead == 0 or found[1] > 10, "nobody waited, so nothing was tested"
