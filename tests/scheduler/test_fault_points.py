"""The places where tests can make something go wrong are reached where they say they are."""

from __future__ import annotations

from cb_backend.support.fault_points import armed
from tests.fakes.engine import FakeEngine


def test_the_scheduler_comes_by_all_its_points() -> None:
    engine = FakeEngine(num_blocks=16, num_host_blocks=16, max_num_seqs=2)
    engine.scheduler._swap.fixed_cost_tokens = 0
    seen: list[str] = []

    def when(point: str) -> int:
        return seen.count(point)

    with armed(seen.append):
        engine.add(1, 20, max_tokens=30)
        second = engine.add(2, 20, max_tokens=30)
        assert when("scheduler.add_request") == 2
        while not second.num_swaps:
            engine.step()
        assert (when("preemption.preempt"), when("swap.put_out"), when("swap.bring_in")) == (1, 1, 0)
        engine.run()
        assert when("swap.bring_in") == engine.scheduler.stats().num_swapped_in == 1
        assert when("kv.allocate_slots") == 3, "two starts, and one again"
        for point in ("kv.append_blocks", "kv.cache_full_blocks", "scheduler.schedule"):
            assert when(point), point
        assert when("plan.launch") == when("results.complete") == len(engine.plans)
        assert when("slots.join") == when("results.leave") == 3
        assert (when("scheduler.cancel"), when("scheduler.expire")) == (0, 0)
        engine.scheduler.cancel(99)
        engine.scheduler.expire()
        assert (when("scheduler.cancel"), when("scheduler.expire")) == (1, 1)
