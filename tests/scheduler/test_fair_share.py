"""Turns between tenants of one priority: shares, bounds, and what nobody gains by.

I10 bounded waiting · documented bound: two tenants that wait all the time differ by no more than the largest request
and what is running.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from cb_backend.contracts.request import Request
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.scheduler.fair_share import MAX_REMEMBERED, FairShare, Flow, fair_order
from tests.fakes.engine import FakeEngine


def joined(engine: FakeEngine) -> list[int]:
    return [row.request_id for plan in engine.plans for row in plan.joined]


def of(tenant: str, priority: int = 0) -> SchedulingParams:
    return SchedulingParams(tenant=tenant, priority=priority)


def test_i10_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    engine = FakeEngine(num_blocks=400, max_num_seqs=2)
    for number in range(100):
        engine.add(number, 4, max_tokens=4, scheduling=of("flood"))
    for _ in range(20):
        engine.step()
    before = len(joined(engine))
    for number in range(100, 105):
        engine.add(number, 4, max_tokens=4, scheduling=of("small"))
    engine.run()
    places = [joined(engine).index(number) - before for number in range(100, 105)]
    assert places[0] <= 1
    assert max(places) <= 10, "turn by turn"


def test_i10_tenants_that_wait_all_the_time_get_the_same_number_of_tokens() -> None:
    sizes = {"long": (40, 30), "short": (4, 4), "talker": (2, 30)}
    num_seqs, largest = 4, 70
    engine = FakeEngine(num_blocks=400, max_num_seqs=num_seqs, max_num_batched_tokens=64, enable_prefix_caching=False)
    tenant_of: dict[int, str] = {}
    for tenant, (prompt, output) in sizes.items():
        for _ in range(1000 // (prompt + output)):
            tenant_of[len(tenant_of)] = tenant
            engine.add(len(tenant_of) - 1, prompt, max_tokens=output, scheduling=of(tenant))
    served: Counter[str] = Counter()
    counted: set[int] = set()
    while {tenant_of[request.request_id] for request in engine.scheduler._queue} == sizes.keys():
        engine.step()
        for request_id in engine.reasons.keys() - counted:
            served[tenant_of[request_id]] += sum(sizes[tenant_of[request_id]])
            counted.add(request_id)
        figures = [served[tenant] for tenant in sizes]
        assert max(figures) - min(figures) <= largest * (1 + num_seqs)
    assert sum(served.values()) > 1800, "the load is not what it should be"


def test_nobody_saves_up_idle_time() -> None:
    engine = FakeEngine(num_blocks=400, max_num_seqs=1)
    for number in range(60):
        engine.add(number, 4, max_tokens=4, scheduling=of("busy"))
    for _ in range(120):
        engine.step()
    before = len(joined(engine))
    for number in range(100, 120):
        engine.add(number, 4, max_tokens=4, scheduling=of("late"))
    engine.run()
    after = joined(engine)[before : before + 20]
    assert 8 <= sum(number >= 100 for number in after) <= 12


def test_who_comes_does_not_pay_less_than_others_for_what_still_runs() -> None:
    engine = FakeEngine(num_blocks=400, max_num_seqs=5, enable_prefix_caching=False)
    for number in range(4):  # long ones: charged for their prompts, and none of them has ended
        engine.add(number, 40, max_tokens=200, scheduling=of("busy"))
    engine.step()
    for number in range(10):
        engine.add(100 + number, 40, max_tokens=1, scheduling=of("busy"))
        engine.add(200 + number, 40, max_tokens=1, scheduling=of("late"))
    while len(joined(engine)) < 4 + 8:
        engine.step()
    assert 3 <= sum(number >= 200 for number in joined(engine)[4 : 4 + 8]) <= 5, "turn by turn"


def test_nobody_washes_a_debt_away_by_leaving_for_a_moment() -> None:
    engine = FakeEngine(num_blocks=400, max_num_seqs=2)
    for number in range(10):
        engine.add(number, 4, max_tokens=20, scheduling=of("steady"))
    engine.add(50, 100, max_tokens=60, scheduling=of("hungry"))
    while 50 not in engine.reasons:
        engine.step()
    engine.step()
    engine.add(51, 4, max_tokens=4, scheduling=of("hungry"))
    engine.run()
    order = joined(engine)
    assert order.index(51) > order.index(50) + 2


def test_i10_new_tenants_that_keep_coming_starve_nobody() -> None:
    engine = FakeEngine(num_blocks=400, max_num_seqs=1)
    engine.add(1, 40, max_tokens=40, scheduling=of("old"))
    engine.run()
    engine.add(2, 4, max_tokens=4, scheduling=of("other"))
    engine.add(3, 4, max_tokens=4, scheduling=of("old"))
    for number in range(10, 400):
        if 3 in engine.reasons:
            break
        engine.add(number, 4, max_tokens=4, scheduling=of(f"new {number}"))
        while engine.scheduler.num_waiting > 2:
            engine.step()
    assert 3 in engine.reasons
    assert joined(engine).index(3) <= 80, "its debt of 80 tokens, shared by at most 3 tenants, is 30 requests of 8"


def test_a_more_urgent_class_comes_before_any_tenants_turn_and_waiting_makes_up_for_it() -> None:
    engine = FakeEngine(num_blocks=400, max_num_seqs=1, priority_aging_s=10.0)
    engine.add(1, 4, max_tokens=4, scheduling=of("a"))
    engine.step()
    engine.add(2, 4, max_tokens=4, scheduling=of("b", priority=1))
    engine.scheduler.set_time(5.0)
    engine.add(3, 4, max_tokens=4, scheduling=of("a"))
    engine.scheduler.set_time(11.0)
    engine.add(4, 4, max_tokens=4, scheduling=of("a"))
    engine.add(5, 4, max_tokens=4, scheduling=of("c"))
    engine.run()
    assert joined(engine) == [1, 5, 3, 2, 4], "turns while class 0 is first, then 2 has waited longer than 4"


def test_o10_a_preempted_request_comes_before_every_tenants_turn() -> None:
    engine = FakeEngine(num_blocks=16, max_num_seqs=3, enable_prefix_caching=False)
    first = engine.add(1, 20, max_tokens=30, scheduling=of("a"))
    second = engine.add(2, 20, max_tokens=30, scheduling=of("b"))
    while not second.num_preemptions:
        engine.step()
    for number in range(3, 6):
        engine.add(number, 4, max_tokens=2, scheduling=of("c"))
    engine.run()
    assert first.num_preemptions == 0
    assert joined(engine)[:3] == [1, 2, 2]


def test_the_number_of_accounts_is_bounded() -> None:
    share = FairShare()
    steady = Request(0, np.zeros(1, np.int32), 1, TokenRules(), (), 2, scheduling=of("steady"))
    share.arrive("steady")
    for number in range(5 * MAX_REMEMBERED):
        request = Request(number, np.zeros(1, np.int32), 1, TokenRules(), (), 2, scheduling=of(f"t{number}"))
        share.arrive(request.scheduling.tenant)
        share.start(request, 10_000.0 + number)
        share.end(request, 10_000 + number, has_started=True)
    assert MAX_REMEMBERED // 2 <= len(share) <= MAX_REMEMBERED + 2
    assert share.num_served(f"t{5 * MAX_REMEMBERED - 1}") > share.virtual_time, "the newest debt is kept"
    share.end(steady, 0, has_started=False)


def test_as_many_debts_as_documented_are_remembered_and_then_the_greater_half() -> None:
    share, num_documented = FairShare(), 1024
    tenants = [f"t{number}" for number in range(num_documented + 1)]

    def in_debt() -> list[str]:
        return [tenant for tenant in tenants if share.num_served(tenant) > share.virtual_time]

    for tenant in (*tenants, *(f"waits {tenant}" for tenant in tenants)):  # so many share that time hardly moves on
        share.arrive(tenant)
    for number, tenant in enumerate(tenants):
        request = Request(number, np.zeros(1, np.int32), 1, TokenRules(), (), 2, scheduling=of(tenant))
        num_tokens = 1_000_000 + number
        share.start(request, num_tokens)
        share.end(request, num_tokens, has_started=True)
        if number == num_documented - 1:
            assert in_debt() == tenants[:-1]
    assert in_debt() == tenants[num_documented // 2 :]


def slow_fair_order(waiting: list[Request], most: int, share: FairShare) -> list[Request]:
    """The rule, written down once more without any speed."""
    left, picked = list(waiting), []
    charged = {request.scheduling.tenant: share.num_served(request.scheduling.tenant) for request in waiting}
    while left and len(picked) < most:
        urgent = min(request.scheduling.priority for request in waiting)
        first = min(left, key=lambda request: request.queue_key)
        if first.scheduling.priority == urgent:
            turns = [request for request in left if request.scheduling.priority == urgent]
            first = min(
                turns,
                key=lambda r: (-1.0 if r.num_preemptions else charged[r.scheduling.tenant], r.queue_key),
            )
        left.remove(first)
        picked.append(first)
        if not first.num_preemptions:
            charged[first.scheduling.tenant] += len(first.token_ids)
    return picked


@pytest.mark.parametrize("seed", range(60))
def test_the_order_is_the_documented_one(seed: int) -> None:
    rng = random.Random(seed)
    share = FairShare()
    waiting, flows = [], {}
    for number in range(rng.randint(0, 25)):
        length = rng.randint(1, 50)
        scheduling = of(rng.choice("abcd"), rng.choice((0, 0, 0, 1, -2)) if seed % 2 else 0)
        request = Request(number, np.zeros(length, np.int32), length, TokenRules(), (), 99, scheduling=scheduling)
        request.queue_key = (0, float(rng.randint(0, 9)), number)
        request.num_preemptions = rng.choice((0, 0, 0, 1))
        share.arrive(scheduling.tenant)
        waiting.append(request)
    for account in share._accounts.values():
        account.num_served = float(rng.randint(0, 100))
    for request in sorted(waiting, key=lambda request: request.queue_key):
        tenant = None if request.num_preemptions else request.scheduling.tenant
        name: Flow = (request.scheduling.priority, tenant)
        flows.setdefault(name, []).append(request)
    for most in (1, 3, 8, 40):
        found = fair_order(flows, most, share)
        expected = slow_fair_order(waiting, most, share)
        if not any(r.scheduling.priority != waiting[0].scheduling.priority for r in waiting):
            assert found == expected
        assert found[:1] == expected[:1]
        assert len(set(found)) == len(found) == min(most, len(waiting))
