"""Adapters of a simulated world: files without contents, read without threads, in slots that say what is in them.

An adapter's path says all: its contents are the path, "slow" ones take as many turns to read as it says, "bad" ones are
refused then. What is under one name changes with the path that front ends see, as a list that is edited does. A row's
cells are of the adapter that its slot holds when its step is run, whatever was planned.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from cb_backend.contracts.adapters import NO_ADAPTER, AdapterKey, AdapterSource
from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request import make_request_id
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.step import StepPlan
from cb_backend.engine.adapter_line import Turn
from cb_backend.engine.adapters import READ_TIMEOUT_S, WITHOUT_ROOM, AdapterStore
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN
from tests.fakes.hash_rule import adapter_salt
from tests.simulation.scenario import Arrival, Scenario

SHARE = 0.3  # of worlds that have adapters
NUM_CROWDED = 80  # arrivals that are added to a crowded world


def with_adapters(scenario: Scenario, share_of_worlds: float = SHARE) -> Scenario:
    """The same world, in some of which requests want adapters. Drawn apart: the rest does not depend on it."""
    rng = random.Random(f"adapters of {scenario.seed}")
    if rng.random() >= share_of_worlds:
        return scenario
    num_slots, num_names = rng.choice((1, 1, 2)), rng.randint(1, 4)
    # What is under each name, until from some turn on it is something else.
    changes_at = rng.randint(1, 40)
    delays = [rng.choice((0, 0, 1, 3, rng.randint(0, 12))) for _ in range(2 * num_names)]
    bad, share = rng.choice((-1, -1, rng.randrange(2 * num_names))), rng.choice((0.4, 0.8, 1.0))
    if rng.random() < 0.1:
        delays[rng.randrange(len(delays))] = 600

    def wanted(arrival: Arrival) -> Arrival:
        if rng.random() >= share:
            return arrival
        number = rng.randrange(num_names)
        place = number + num_names * (arrival.at_step >= changes_at)
        mark = "bad" if place == bad else "slow"
        return replace(arrival, adapter=f"name{number}/{place}/{mark}/{delays[place]}")

    most_kept = rng.choice((num_slots, num_slots, num_slots + 1, 8))
    config = replace(scenario.config, enable_lora=True, max_loras=num_slots, max_cpu_loras=most_kept)
    arrivals = tuple(map(wanted, scenario.arrivals))
    return replace(scenario, config=config, arrivals=arrivals, num_adapter_slots=num_slots)


def undisturbed(arrival: Arrival) -> Arrival:
    """It is not cancelled, and waits for no grammar."""
    params = msgspec.structs.replace(arrival.params, structured_output=None)
    return replace(arrival, params=params, cancel_at=None, cancel_in=None)


def joined_by(added: list[Arrival], scenario: Scenario) -> Scenario:
    """The same world with these arrivals, none of which finds the queue full."""
    arrivals = sorted((*scenario.arrivals, *added), key=lambda arrival: arrival.at_step)
    config = replace(scenario.config, max_queue_size=1000, max_queue_tokens=1 << 24)
    return replace(scenario, config=config, arrivals=tuple(arrivals))


def crowded(scenario: Scenario) -> Scenario:
    """The same world, to which many more requests come: for as many adapters as are kept, step by step, and few for
    others, which have no room until one of those is needed by nobody."""
    rng, config = random.Random(f"crowd of {scenario.seed}"), scenario.config
    popular = [f"popular{number}/{number}/slow/0" for number in range(config.max_cpu_loras or 1)]
    added = [
        replace(
            arrival := undisturbed(rng.choice(scenario.arrivals)),
            request_id=make_request_id(rng.randint(0, 2), len(scenario.arrivals) + number),
            at_step=rng.randint(0, 2 * len(popular)) if number < len(popular) else rng.randint(0, NUM_CROWDED),
            scheduling=msgspec.structs.replace(arrival.scheduling, timeout_ms=None, queue_timeout_ms=None),
            adapter=f"rare{number}/{number}/slow/1" if number % 20 == 19 else popular[number % len(popular)],
        )
        for number in range(NUM_CROWDED)
    ]
    return joined_by(added, scenario)


def besieged(scenario: Scenario) -> Scenario:
    """The same world, to which many more requests come, nearly all for three adapters that fill the slots of the
    device, and few for others, which find none until one of the three is asked for by nobody. They are of one class and
    tenant, or of several."""
    rng = random.Random(f"siege of {scenario.seed}")
    priorities, tenants = rng.choice(((0,), (-1, 0, 0, 1))), rng.choice((("",), ("", "", "another")))
    added = [
        replace(
            undisturbed(rng.choice(scenario.arrivals)),
            request_id=make_request_id(rng.randint(0, 2), len(scenario.arrivals) + number),
            at_step=number // 2,
            scheduling=SchedulingParams(priority=rng.choice(priorities), tenant=rng.choice(tenants)),
            adapter=f"rare{number}/1/slow/0" if number % 16 == 15 else f"popular{rng.randrange(3)}/1/slow/0",
        )
        for number in range(2 * NUM_CROWDED)
    ]
    config = replace(scenario.config, max_loras=3, max_cpu_loras=32, max_num_seqs=16, max_num_batched_tokens=512)
    num_blocks = scenario.num_blocks + 400  # it is not memory that they wait for
    return joined_by(added, replace(scenario, config=config, num_adapter_slots=3, num_blocks=num_blocks))


def key_of(path: str) -> AdapterKey:
    """Of an adapter's contents; empty where there is none."""
    return path.encode()


def source_of(arrival: Arrival) -> AdapterSource | None:
    if not arrival.adapter:
        return None
    return AdapterSource(arrival.adapter.partition("/")[0], arrival.adapter, 1, 1)


def salt_of(arrival: Arrival, own: bytes) -> bytes:
    """What the request's cells hold; `own`: of its client's salt."""
    return own + adapter_salt(key_of(arrival.adapter))


def may_be_refused(arrival: Arrival, turn_s: float) -> bool:
    """Whether the adapter is bad, or takes longer to read than is waited for."""
    if not arrival.adapter:
        return False
    _, _, mark, num_turns = arrival.adapter.split("/")
    return mark == "bad" or int(num_turns) * turn_s > READ_TIMEOUT_S


class Packed:
    """An adapter in host memory."""

    def __init__(self, key: AdapterKey) -> None:
        self.key = key
        self.stamp = None


class Reader:
    """A runner's part that reads adapters."""

    def __init__(self) -> None:
        self.packed_of: Callable[[AdapterKey], Packed] | None = None

    def read(self, path: str) -> Packed:
        if path.split("/")[2] == "bad":
            raise InvalidRequestError("the weights are not finite")
        return Packed(key_of(path))


class _Reading:
    """Stands for the future of a read."""

    def __init__(self, read: Callable[[AdapterSource], Packed], source: AdapterSource, turn: Callable[[], int]) -> None:
        self._read, self._source, self._turn = read, source, turn
        self._ready_at = turn() + int(source.path.rpartition("/")[2])

    def cancel(self) -> bool:
        """Its thread is at the files from the start."""
        return False

    def done(self) -> bool:
        return self._turn() >= self._ready_at

    def running(self) -> bool:
        return not self.done()

    def result(self) -> Packed:
        return self._read(self._source)


class ReadersInTurns:
    """Stands for the threads that read: each read takes the turns that its path says."""

    def __init__(self, turn: Callable[[], int]) -> None:
        self._turn = turn

    def submit(self, read: Callable[[AdapterSource], Packed], source: AdapterSource) -> _Reading:
        return _Reading(read, source, self._turn)

    def shutdown(self, **_: Any) -> None:
        """There is nothing to give back."""


class AdapterChecks:
    """I21 no slot is written while a launched, unread step has a row of it · I22 rows of one plan use slots that there
    are, each with the adapter that its request wants.
    """

    def __init__(self, num_slots: int, counters: Counter[str]) -> None:
        self._num_slots = num_slots
        self._counters = counters
        self._resident: dict[int, AdapterKey] = {}
        self._slot_of: dict[int, int] = {}  # device slot of an adapter, by the row's slot
        self._used: dict[int, set[int]] = {}  # by step

    def check(self, plan: StepPlan, in_flight: Iterable[int], wanted: Mapping[int, AdapterKey]) -> None:
        """in_flight: ids of steps that are launched and not read; wanted: adapters by the slots of the plan's rows."""
        self._slot_of.update({row.slot: row.adapter for row in plan.joined})
        used = {slot: self._slot_of[slot] for slot in plan.slots.tolist()}
        for device_slot, key in plan.adapter_loads:
            assert 0 <= device_slot < self._num_slots, "I22: a slot that is not there"
            assert device_slot in used.values(), "I22: an adapter is loaded for nobody"
            for step_id in in_flight:
                assert device_slot not in self._used[step_id], "I21: written while a launched step reads it"
            self._resident[device_slot] = key
        for slot, device_slot in used.items():
            held = self._resident.get(device_slot, b"") if device_slot != NO_ADAPTER else b""
            assert held == wanted[slot], f"I22: {wanted[slot]!r} is wanted, and slot {device_slot} has {held!r}"
        self._used[plan.step_id] = {*used.values()} - {NO_ADAPTER}
        assert len(self._used[plan.step_id]) <= self._num_slots, "I22: more adapters than slots"
        self._counters["adapter loads"] += len(plan.adapter_loads)
        self._counters["steps of several adapters"] += len({*used.values()}) > 1

    def lost(self, plan: StepPlan) -> None:
        """Nobody knows what its loads have done: they are made again before anything else uses their slots."""
        for device_slot, _ in plan.adapter_loads:
            self._resident.pop(device_slot, None)


class RoomChecks:
    """Stands around the adapters in host memory. I23 nobody waits for room there while more than `MAX_OVERTAKEN` later
    requests are given their adapters · I24 no more adapters have room than are to be kept.

    `expect` is told what must be so, and what is wrong where it is not.
    """

    def __init__(self, store: AdapterStore, expect: Callable[[bool, str], None], counters: Counter[str]) -> None:
        self._store, self._expect, self._counters = store, expect, counters
        self._find, self._tidy = store.find, store.tidy
        self._passed: dict[int, tuple[Turn, int]] = {}  # who found no room, and how many have passed
        self._asked: set[int] = set()  # in this round
        store.find, store.tidy = self.find, self.tidy  # type: ignore[method-assign]

    def find(self, source: AdapterSource, now: float, turn: Turn | None = None) -> AdapterKey | None:
        if turn is None:
            return self._find(source, now)
        self._asked.add(turn.number)
        known = self._passed.pop(turn.number, (turn, 0))  # nor does it wait if this is an error
        key = self._find(source, now, turn)
        if key is None and self._store.turn_of(source) == WITHOUT_ROOM:
            self._passed[turn.number] = known
        if key is not None:
            for number, (other, num_passed) in self._passed.items():
                self._passed[number] = other, num_passed + (turn > other)
                self._expect(num_passed + (turn > other) <= MAX_OVERTAKEN, "I23: passed too often on the host")
                self._counters["passed on the host"] += turn > other
        return key

    def tidy(self, in_use: Callable[[], Container[AdapterKey]], now: float) -> None:
        self._tidy(in_use, now)
        self._passed = {number: told for number, told in self._passed.items() if number in self._asked}
        self._asked.clear()
        num_kept = len(self._store._kept) + len(self._store._reading)
        self._expect(num_kept <= self._store._most_kept, "I24: more adapters than there is room for")
