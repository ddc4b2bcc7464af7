"""Simulated worlds with adapters: whoever is led to the wrong slot, or to another adapter's blocks, is found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import pytest

from cb_backend.contracts.adapters import NO_ADAPTER, AdapterKey
from cb_backend.contracts.step import StepPlan
from cb_backend.engine.adapter_line import RoomLine
from cb_backend.engine.scheduler.adapter_slots import AdapterSlots
from cb_backend.engine.scheduler.adapter_turns import AdapterTurns
from cb_backend.engine.scheduler.plan import InFlightSteps
from cb_backend.kv_cache.manager import KVCacheManager
from tests.fakes.runners import HashRunner
from tests.simulation.adapters import besieged, crowded
from tests.simulation.draw import Kind, make_scenario
from tests.simulation.scenario import Scenario
from tests.simulation.sweep import run_seed
from tests.simulation.world import World


def worlds() -> Iterator[Scenario]:
    """Those with adapters."""
    return (scenario for seed in range(2000) if (scenario := make_scenario(seed)).num_adapter_slots)


def test_worlds_with_adapters_keep_every_invariant() -> None:
    found: Counter[str] = Counter()
    for scenario in islice(worlds(), 40):
        found += run_seed(scenario.seed)
    wanted = ("adapter loads", "steps of several adapters", "refused: adapter", "resumed", "prefix hit tokens")
    assert all(found[name] > 10 for name in wanted), found


@pytest.mark.parametrize("seed", [1001572, 1024020, 1049180])
def test_a_launched_step_has_its_adapters_though_nobody_keeps_them_on_the_host_any_more(seed: int) -> None:
    """Whoever they were loaded for has gone, and another wants their room, before the step is done."""
    assert run_seed(seed, Kind((2, 7), has_adapters=True))["adapter loads"] > 1


def test_the_rest_of_a_world_does_not_depend_on_its_adapters() -> None:
    for scenario in islice(worlds(), 10):
        assert any(arrival.adapter for arrival in scenario.arrivals)
        assert make_scenario(scenario.seed) == scenario
    shares = [bool(make_scenario(seed).num_adapter_slots) for seed in range(300)]
    assert 60 < sum(shares) < 120


def first_violation(match: str) -> str:
    for scenario in islice(worlds(), 120):
        try:
            World(scenario).run()
        except AssertionError as error:
            if match in str(error):
                return str(error)
    raise AssertionError(f"no world has found out: {match}")


def test_who_is_passed_without_end_while_he_waits_for_room_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In worlds where others ask for what is kept in every step."""

    def run_all() -> Counter[str]:
        return sum((World(crowded(world)).run() for world in islice(worlds(), 8)), Counter[str]())

    assert run_all()["passed on the host"] > 100
    monkeypatch.setattr(RoomLine, "may_pass", lambda line, turn: True)
    with pytest.raises(AssertionError, match="I23"):
        run_all()


def test_who_lacks_a_slot_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In worlds where others ask for what is in the slots in every step."""

    def run_all() -> Counter[str]:
        return sum((World(besieged(world)).run() for world in islice(worlds(), 22, 28)), Counter[str]())

    found = run_all()
    assert found["joined before the one that is due"] > 10
    assert found["joined behind the one that is due"] > 10
    for name, wrong in (("must_wait", AdapterTurns.lacks), ("joined", lambda turns, request: None)):
        with monkeypatch.context() as patch:
            patch.setattr(AdapterTurns, name, wrong)
            with pytest.raises(AssertionError, match="I25"):
                run_all()


def _early(
    real: Callable[..., None], steps: InFlightSteps, slot: int, epoch: int, give_back: Callable[[], None],
    *blocks: object, adapter_slot: int = NO_ADAPTER,
) -> None:  # fmt: skip
    if adapter_slot == NO_ADAPTER:
        return real(steps, slot, epoch, give_back, *blocks)
    return give_back()


def test_a_slot_that_is_overwritten_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InFlightSteps, "free_when_safe", _wrapped(_early, InFlightSteps.free_when_safe))
    assert first_violation("I21")


def _wrapped(function: Callable[..., None], real: Callable[..., None]) -> Callable[..., None]:
    bound = partial(function, real)
    return lambda *args, **kwargs: bound(*args, **kwargs)


def test_a_load_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = AdapterSlots.take

    def take_as_resident(slots: AdapterSlots, key: AdapterKey) -> tuple[int, bool]:
        return take(slots, key)[0], False

    monkeypatch.setattr(AdapterSlots, "take", take_as_resident)
    assert first_violation("I22")


def test_blocks_of_another_adapter_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that is looked up without the adapter leads to what was computed with another one, or none."""
    find = KVCacheManager.get_computed_blocks

    def find_without(manager: KVCacheManager, request: object) -> object:
        salt, request.cache_salt = request.cache_salt, request.cache_salt.partition(b"lora")[0]  # type: ignore[attr-defined]
        try:
            return find(manager, request)  # type: ignore[arg-type]
        finally:
            request.cache_salt = salt  # type: ignore[attr-defined]

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", find_without)
    found = 0
    for scenario in islice(worlds(), 120):
        try:
            World(scenario).run()
        except Exception:
            found += 1
    assert found > 3


def test_an_adapter_that_is_not_there_when_the_step_runs_changes_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is what the slot holds then: here a load comes a step late."""
    swap, late = HashRunner._swap, {}

    def swap_late(runner: HashRunner, plan: StepPlan) -> None:
        before = dict(runner._adapter_slots)
        swap(runner, plan)
        now = runner._adapter_slots
        runner._adapter_slots = {**before, **late.get(id(runner), {})}
        late[id(runner)] = now

    monkeypatch.setattr(HashRunner, "_swap", swap_late)
    found = 0
    for scenario in islice(worlds(), 20):
        try:
            World(scenario).run()
        except AssertionError:
            found += 1
    assert found > 5
