"""Nobody is preempted in vain: what is free or on its way counts to the last block."""

from __future__ import annotations

from cb_backend.contracts.scheduling import SchedulingParams
from tests.fakes.engine import FakeEngine

URGENT, LOW = SchedulingParams(priority=-1), SchedulingParams(priority=1)


def test_the_last_block_on_its_way_is_waited_for() -> None:
    """Three streams, six blocks; the first ends just in time, and gives back the one block that is short."""
    engine = FakeEngine(num_blocks=6, block_size=2, run_ahead=4, enable_prefix_caching=False)
    for number, (num_prompt, max_tokens) in enumerate([(2, 2), (1, 5), (3, 5)], 1):
        engine.add(number, num_prompt, max_tokens=max_tokens)
    engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert max(len(plan.slots) for plan in engine.plans) == 3, "they run together"
    assert {number: len(tokens) for number, tokens in engine.tokens.items()} == {1: 2, 2: 5, 3: 5}


def test_who_waited_for_a_block_comes_first_only_until_all_have_one() -> None:
    engine = FakeEngine()
    engine.add(1, 4)
    engine.step()
    preemption = engine.scheduler._preemption
    preemption._waiting = [(0, 0)]
    engine.step()
    assert preemption._waiting == []


def test_an_urgent_request_waits_for_blocks_that_just_suffice() -> None:
    engine = FakeEngine(num_blocks=5, block_size=4, run_ahead=1, enable_prefix_caching=False)
    engine.add(1, 11, max_tokens=1)  # is about to give back three
    engine.add(2, 1, max_tokens=2, scheduling=LOW)
    engine.launch()
    assert engine.scheduler.num_free_blocks == 1
    engine.add(3, 7, max_tokens=1, scheduling=URGENT)  # two, and one for each that runs to grow into
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_an_urgent_request_takes_from_no_more_than_it_needs() -> None:
    engine = FakeEngine(num_blocks=5, block_size=4, enable_prefix_caching=False)
    engine.add(1, 1, max_tokens=3, scheduling=LOW)
    last = engine.add(2, 11, max_tokens=2, scheduling=LOW)  # its three blocks just suffice
    engine.step()
    assert engine.scheduler.num_free_blocks == 1
    engine.add(3, 7, max_tokens=1, scheduling=URGENT)
    engine.run()
    assert (engine.scheduler.num_preemptions, last.num_preemptions) == (1, 1)
