"""How the budget of a step is divided, at its edges: who is a giant, who is short beside it, what the pace is asked.

The planner alone, over a slot table, a queue and a pace that say what a case wants.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cb_backend.contracts.config import EngineConfig
from cb_backend.engine.scheduler.prefill import PrefillPlanner

BUDGET = 100
UNBOUNDED = 1 << 30


class Pace:
    """Notes what it is asked."""

    has_limit = True

    def __init__(self, saved: float = 1.0, lost: float = 0.0) -> None:
        self.shares, self.asked = (saved, lost), []

    def shares_by_draining(self, *given: float) -> tuple[float, float]:
        self.asked.append(given)
        return self.shares

    def most_prefill_tokens(self, *given: float) -> int:
        self.asked.append(given)
        return BUDGET

    holds_up_last_tokens = False

    def must_be_small(self, num_decode: int, num_pairs: float, most: int) -> bool:
        return False


class Plan:
    """Of a step in which nobody decodes."""

    decode: Any = None
    num_decode_rows = num_rows = 0

    def __init__(self, budget: int = BUDGET) -> None:
        self.budget, self.prefill = budget, []

    def add_prefill(self, slot: int, num_computed: int, num_scheduled: int, wants: int) -> None:
        self.prefill.append((slot, num_computed, num_scheduled, wants))
        self.budget -= num_scheduled

    @property
    def chunks(self) -> list[tuple[int, int]]:
        return [(slot, scheduled) for slot, _, scheduled, _ in self.prefill]


def planner(
    left: list[int], waiting: list[int] | None = None, computed: int = 500, pace: Pace | None = None
) -> PrefillPlanner:
    """Slots 0, 1, ... have so many tokens of their prompts left, after `computed`; 0: they decode. waiting: prompts."""
    queue = waiting or []
    table = SimpleNamespace(
        order=np.arange(len(left)), num_running=len(left), num_computed_tokens=np.full(len(left), computed),
        num_prefill_tokens=np.array(left, int) + computed, request_at=lambda slot: SimpleNamespace(is_pooling=False),
    )  # fmt: skip
    line = SimpleNamespace(num_tokens=sum(queue))
    config = EngineConfig(
        model="m", max_num_seqs=8, max_num_batched_tokens=BUDGET, prefill_policy="hybrid", max_itl_ms=9
    )
    made: Any = PrefillPlanner(SimpleNamespace(config=config, table=table, queue=_Queue(queue, line)), pace or Pace())  # type: ignore[arg-type]
    made._full_steps = SimpleNamespace(most_prompt_tokens=lambda num_decode: UNBOUNDED)
    return made


class _Queue:
    def __init__(self, waiting: list[int], line: SimpleNamespace) -> None:
        self._waiting, self.num_tokens = waiting, line.num_tokens

    def __len__(self) -> int:
        return len(self._waiting)


def planned(left: list[int], budget: int = BUDGET) -> list[tuple[int, int]]:
    plan: Any = Plan(budget)
    planner(left).plan(plan, None)
    return plan.chunks


def test_a_prompt_of_a_quarter_of_the_giants_goes_before_it_and_a_longer_one_does_not() -> None:
    assert planned([120, 30]) == [(1, 30), (0, 70)]
    assert planned([120, 31]) == [(0, 100)]
    assert planned([400, 20, 100, 101, 10]) == [(4, 10), (1, 20), (2, 20), (0, 50)], "the shortest first, in half"


def test_a_prompt_that_a_step_can_finish_is_no_giant() -> None:
    assert planned([100, 5]) == [(0, 100)]
    assert planned([101, 5]) == [(1, 5), (0, 95)]


def test_a_short_one_is_planned_once() -> None:
    assert planned([400, 30, 30]) == [(1, 30), (2, 20), (0, 50)]


def test_the_last_token_of_a_budget_is_used_and_none_beyond_it() -> None:
    assert planned([60, 40, 7]) == [(0, 60), (1, 40)]
    assert planned([99, 7]) == [(0, 99), (1, 1)]


@pytest.mark.parametrize(("left", "position"), [([50, 60], 500), ([0, 0], 0)])
def test_the_pace_is_asked_for_the_place_of_the_first_prompt(left: list[int], position: int) -> None:
    pace = Pace()
    plan: Any = Plan()
    plan.decode, plan.num_decode_rows, plan.num_rows = SimpleNamespace(computed=np.array([3, 4])), 2, 2
    made: Any = planner(left, waiting=[5], pace=pace)
    made._table.num_running = 3
    made._table.num_computed_tokens[1:] = 9
    made._table.num_prefill_tokens[1:] = 9 + left[1]
    made.plan(plan, lambda *_: False)
    assert pace.asked == [(2, 7.0, position)]


def test_draining_is_weighed_by_who_waits_and_who_streams() -> None:
    """Two streams, one prompt that has begun with 30 tokens left, three of 10 that wait."""
    pace = Pace(saved=1.0, lost=1.9)
    assert planner([0, 30, 0], [10, 10, 10], pace=pace).is_better_without_streams(), "4 x 1.0 > 2 x 1.9"
    assert pace.asked == [(2, 1000.0, 60)]
    assert not planner([0, 30, 0], [10, 10, 10], pace=Pace(1.0, 2.0)).is_better_without_streams()
    bounded = Pace()
    planner([0, 30], [90], pace=bounded).is_better_without_streams()
    assert bounded.asked == [(1, 500.0, BUDGET)], "no more than a step's budget"


@pytest.mark.parametrize(("left", "waiting"), [([30, 30], [10]), ([0, 0], []), ([], [10])])
def test_without_streams_or_prompts_there_is_nothing_to_drain(left: list[int], waiting: list[int]) -> None:
    pace = Pace()
    assert planner(left, waiting, pace=pace).is_better_without_streams() is False
    assert pace.asked == []
