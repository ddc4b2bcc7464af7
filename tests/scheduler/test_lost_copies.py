"""Blocks that a failed step was to copy to host memory: whoever rests on them is computed again, and nobody else."""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.contracts.request import FinishReason, Request, RequestStatus
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.kv_cache.swap_space import SwapSpace
from tests.fakes.engine import FakeEngine
from tests.scheduler.test_swap import growing_pair, hash_engine, lone_output, swaps
from tests.simulation.expectations import check_cached_content


def brought_in_while_its_copy_is_in_flight(run_ahead: int = 1) -> tuple[FakeEngine, Request]:
    """Request 1 has left its slot to request 2 in a step, and has it again in the next; both steps are in flight.

    The runner does nothing before a result is asked for.
    """
    engine = hash_engine(run_ahead)
    first = engine.add(1, 100, max_tokens=20)
    for _ in range(4):
        engine.step()
    engine.scheduler.reset_prefix_cache()  # or it would find its blocks there
    engine.add(2, 5, scheduling=SchedulingParams(priority=-1))
    while engine.in_flight:
        engine.finish()
    out = engine.launch()
    assert out is not None
    assert [row.request_id for row in out.joined] == [2]
    engine.scheduler.cancel(2)
    back = engine.launch()
    assert back is not None
    assert [row.request_id for row in back.joined] == [1]
    assert len(out.copies.out) == len(back.copies.back) > 25
    return engine, first


def fail_oldest(engine: FakeEngine) -> list[int]:
    """The oldest launched step fails. Returns the ids of the requests that end with it."""
    plan, _ = engine.in_flight.popleft()
    output = engine.scheduler.fail_step(plan.step_id)
    engine.take(output)
    engine.scheduler.check_integrity()
    return output.request_ids.tolist()


@pytest.mark.parametrize("run_ahead", [1, 4])
def test_who_runs_on_what_a_failed_step_was_to_copy_is_computed_again(run_ahead: int) -> None:
    engine, first = brought_in_while_its_copy_is_in_flight(run_ahead)
    (written,) = (row.block_ids for row in engine.plans[-1].joined)
    known = [1] * 100 + engine.tokens[1]
    assert fail_oldest(engine) == []
    assert (first.status, first.num_preemptions) == (RequestStatus.PREEMPTED, 1)
    again = engine.launch()
    assert again is not None
    assert (again.copies.back, again.first.tolist()) == ((), [0])
    (row,) = again.joined
    assert row.token_ids.tolist() == known
    assert set(row.block_ids).isdisjoint(written), "a launched step writes them"
    engine.run()
    assert engine.tokens[1] == lone_output([1] * 100, 20)
    assert engine.reasons == {1: FinishReason.LENGTH}


def test_nothing_that_rests_on_a_copy_of_a_failed_step_is_told_or_found_in_the_cache() -> None:
    engine, _ = brought_in_while_its_copy_is_in_flight()
    fail_oldest(engine)
    engine.run()
    check_cached_content(engine.kv, engine.runner)
    engine.add(3, 101 * [1], max_tokens=9)
    engine.run()
    assert engine.tokens == {
        1: lone_output([1] * 100, 20), 2: [], 3: lone_output([1] * 101, 9)
    }  # fmt: skip


def test_who_has_ended_meanwhile_does_not_come_back_when_its_copy_fails() -> None:
    engine, first = brought_in_while_its_copy_is_in_flight()
    assert engine.scheduler.cancel(1)
    assert fail_oldest(engine) == []
    assert first.status is RequestStatus.FINISHED_ABORTED
    assert engine.scheduler.num_waiting == 0
    engine.run()


def test_who_is_computed_again_before_its_copy_fails_is_not_once_more() -> None:
    engine, first = brought_in_while_its_copy_is_in_flight(run_ahead=4)
    engine.add(3, 5, scheduling=SchedulingParams(priority=-1))
    engine.launch()  # in its slot again, before anything it has computed is known
    engine.scheduler.cancel(3)
    again = engine.launch()
    assert again is not None
    assert (again.copies.back, again.first.tolist()) == ((), [0])
    assert fail_oldest(engine) == []
    assert (first.status, first.num_preemptions) == (RequestStatus.RUNNING, 2)
    engine.run()
    assert engine.tokens[1] == lone_output([1] * 100, 20)


@pytest.mark.parametrize("is_back_before", [False, True])
@pytest.mark.parametrize(("last_back", "distrusted"), [(6, [1]), (7, [])])
def test_who_runs_on_a_copy_is_remembered_until_the_copy_has_come_back(
    last_back: int, distrusted: list[int], is_back_before: bool
) -> None:
    space = SwapSpace(num_blocks=50)
    request = Request(1, np.ones(101, np.int32), 100, TokenRules(), (), 200, block_table=list(range(1, 27)))
    assert space.put_out(request, request.block_table[:25], 100)
    assert len(space.launch(7)) == 25
    if is_back_before:
        space.came_back(last_back)
    space.bring_in(request, [])
    if not is_back_before:
        space.came_back(last_back)
    assert space.distrust(7) == distrusted


def test_what_is_not_read_any_more_takes_no_host_block_and_what_was_found_no_copy() -> None:
    space = SwapSpace(num_blocks=5)
    request = Request(1, np.ones(101, np.int32), 100, TokenRules(), (), 200)
    assert not space.put_out(request, [1, 2, 3, 4, 5, 6], 100)
    assert space.put_out(request, [1, 0, 2, 0, 3, 4], 100)
    assert [device for device, _ in space.launch(7)] == [1, 2, 3, 4]
    assert space.num_free_blocks == 1
    space.check_integrity({1})
    # Room for more tokens; the first block was found, the second found one is not the table's.
    request.block_table = [11, 0, 12, 0, 13, 14, 15]
    assert [device for device, _ in space.bring_in(request, [11, 9, 10])] == [12, 13, 14]
    assert space.num_free_blocks == 5


@pytest.mark.parametrize("event", ["cancel", "reset"])
def test_copies_that_no_plan_has_taken_are_not_made_for_who_needs_them_no_more(event: str) -> None:
    engine, second = growing_pair(num_host_blocks=100, run_ahead=2)
    while not second.num_swaps:
        engine.step()
    assert engine.launch() is None, "the victim's blocks are still written"
    if event == "cancel":
        engine.scheduler.cancel(2)
    else:
        engine.scheduler.reset_prefix_cache()
    engine.run()
    assert swaps(engine) == ([], [])
    assert engine.tokens[1] == list(range(10, 50))
