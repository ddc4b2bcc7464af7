"""Lengths are bounds: what must be had is asked for the most a row can have, its end for the fewest it is sure of.

Without guesses both are one figure, and nobody pays for what might be: X1.
"""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.contracts.step import NoMasks
from cb_backend.engine.scheduler.plan import DecodeBatch
from cb_backend.engine.scheduler.slots import SlotTable
from cb_backend.engine.step_shapes import StepShape, adapter_shapes, step_shapes
from tests.fakes.engine import FakeEngine


def running(num_computed: int, num_unsure: int = 0) -> tuple[FakeEngine, SlotTable, int]:
    """One request: 5 tokens of prompt and 8 at most after them, in blocks of 4. So many of its tokens are computed, of
    which some may turn out not to be."""
    engine = FakeEngine(run_ahead=3)
    request = engine.add(1, 5)
    engine.launch()
    table = engine.scheduler._table
    while table.num_computed_tokens[request.slot] < num_computed:
        engine.launch()
        if len(engine.in_flight) > 3:
            engine.finish()
    table.num_unsure[request.slot] = num_unsure
    return engine, table, request.slot


@pytest.mark.parametrize("run_ahead", [0, 3])
@pytest.mark.parametrize("windows", [(0,), (0, 4)])
def test_x1_without_guesses_a_bound_is_the_figure_itself(windows: tuple[int, ...], run_ahead: int) -> None:
    engine = FakeEngine(num_blocks=24, run_ahead=run_ahead, windows=windows, max_num_batched_tokens=16)
    for request_id in range(6):
        engine.add(request_id, 7 + 5 * request_id, max_tokens=6, stop_ids=(13,) if request_id == 2 else ())
    table = engine.scheduler._table
    while engine.scheduler.has_unfinished():
        engine.step()
        assert (table.num_sure_tokens(table.order) == table.num_computed_tokens[table.order]).all()
    assert {plan.num_drafts for plan in engine.plans} == {0}
    assert engine.tokens[0] == [10, 11, 12, 13, 14, 15]
    assert engine.tokens[2] == [10, 11, 12, 13]


def test_x1_a_result_has_one_token_a_row_where_a_plan_has_no_guesses() -> None:
    engine = FakeEngine()
    engine.add(1, 5)
    engine.add(2, 6)
    for _ in range(2):
        plan = engine.scheduler.schedule()
        assert plan is not None
        result = engine.runner.execute(plan, NoMasks()).result()
        assert result.token_ids.shape == (plan.num_rows, 1 + plan.num_drafts) == (2, 1)
        assert result.num_new.tolist() == [1, 1]
        engine.scheduler.update_from_output(result)


@pytest.mark.parametrize("sizes", [(4, 64), (64, 512), (256, 2048), (256, 8192)])
def test_x1_no_graph_is_captured_for_guesses_and_none_for_adapters_unasked(sizes: tuple[int, int]) -> None:
    base, adapted = step_shapes(*sizes), adapter_shapes(*sizes)
    assert {shape.num_drafts for shape in (*base, *adapted)} == {0}
    assert not any(shape.has_adapters for shape in base)
    assert all(shape.has_adapters for shape in adapted)
    for shape in base:
        plain = StepShape(shape.num_decode, shape.num_prefill, shape.num_prompts)
        assert shape == plain, "a field of a feature is set where nobody uses it"
        assert (shape.num_rows, shape.num_tokens, shape.layout()) == (plain.num_rows, plain.num_tokens, plain.layout())


def test_a_row_goes_on_until_it_is_sure_of_its_last_token() -> None:
    """12 of 13 tokens are computed at most, the last of which is never an input: without doubt it has nothing to do."""
    _, table, slot = running(12)
    assert DecodeBatch(table).slots.tolist() == []
    table.num_unsure[slot] = 2
    batch = DecodeBatch(table)
    assert (batch.slots.tolist(), batch.computed.tolist(), batch.num_steps_left) == ([slot], [12], 2)


def test_a_row_that_may_still_be_in_its_prompt_does_not_decode() -> None:
    _, table, slot = running(6)
    assert DecodeBatch(table).slots.tolist() == [slot]
    table.num_prefill_tokens[slot] = 6
    assert DecodeBatch(table).slots.tolist() == [slot]
    table.num_unsure[slot] = 1
    assert DecodeBatch(table).slots.tolist() == []


@pytest.mark.parametrize("num_unsure", [0, 1, 2])
def test_a_block_is_asked_for_the_most_that_a_row_can_have(num_unsure: int) -> None:
    """8 tokens fill two blocks: the ninth has no room, though the row may turn out to have fewer."""
    _, table, slot = running(8, num_unsure)
    batch = DecodeBatch(table)
    assert (batch.computed.tolist(), batch.out_of_room.tolist(), batch.room.tolist()) == ([8], [0], [8])
    assert batch.num_steps_left == 4 + num_unsure
    assert table.num_sure_tokens(np.array([slot])).tolist() == [8 - num_unsure]


def test_whoever_has_the_slot_next_is_sure_of_what_it_has() -> None:
    engine, table, slot = running(6, num_unsure=1)
    engine.scheduler.cancel(1)
    other = engine.add(2, 5)
    while other.slot != slot:
        engine.launch()
        engine.finish()
    assert table.num_unsure[slot] == 0


def test_a_batch_that_rows_were_left_out_of_does_not_go_on_as_it_is() -> None:
    _, table, slot = running(6)
    batch = DecodeBatch(table)
    assert batch.can_continue
    assert batch.constants()[1].tolist() == [slot]
    batch.drop([slot])
    assert not batch.can_continue
    assert batch.constants()[1].tolist() == []


def test_only_who_is_sure_to_end_gives_its_blocks_back_without_a_decision() -> None:
    engine, table, slot = running(12)
    preemption = engine.scheduler._preemption
    assert preemption._ending_and_others() == ([slot], [])
    table.num_unsure[slot] = 1
    assert preemption._ending_and_others() == ([], [slot])


def test_what_is_known_cannot_be_unsure() -> None:
    engine, table, slot = running(6)
    unknown = int(table.num_computed_tokens[slot] + 1 - table.num_known_tokens[slot])
    table.num_unsure[slot] = unknown
    engine.scheduler.check_integrity()
    table.num_unsure[slot] = unknown + 1
    with pytest.raises(AssertionError, match=f"slot {slot}: what is known is called unsure"):
        engine.scheduler.check_integrity()
