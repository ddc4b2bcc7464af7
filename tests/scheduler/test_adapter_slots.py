"""Slots of adapters by themselves: pytest tests/scheduler/test_adapter_slots.py"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cb_backend.engine.scheduler.adapter_slots import AdapterSlots


def test_an_adapter_is_loaded_once_and_found_again() -> None:
    slots = AdapterSlots(2)
    first, must_load = slots.take(b"a")
    assert must_load
    assert slots.take(b"a") == (first, False)
    second, must_load = slots.take(b"b")
    assert must_load
    assert second != first
    assert (slots.num_loads, slots.num_resident) == (2, 2)


def test_no_room_while_all_are_in_use() -> None:
    slots = AdapterSlots(1)
    slot, _ = slots.take(b"a")
    assert slots.has_room(b"a")
    assert not slots.has_room(b"b")
    slots.take(b"a")
    slots.give_back(slot)
    assert not slots.has_room(b"b"), "one of its two users is left"
    slots.give_back(slot)
    assert slots.has_room(b"b")
    assert not AdapterSlots(0).has_room(b"a")


def test_the_least_recently_used_is_overwritten_and_empty_slots_come_first() -> None:
    slots = AdapterSlots(3)
    a, b = slots.take(b"a")[0], slots.take(b"b")[0]
    slots.give_back(b)
    slots.give_back(a)
    c, _ = slots.take(b"c")
    assert c not in (a, b), "there was an empty one"
    assert slots.take(b"d") == (b, True), "given back before a"
    assert slots.take(b"a") == (a, False)
    assert not slots.has_room(b"b")


def test_what_a_failed_step_was_to_fill_is_not_found_again() -> None:
    slots = AdapterSlots(2)
    a, _ = slots.take(b"a")
    slots.launched(1, [a])
    slots.came_back(1)
    b, _ = slots.take(b"b")
    slots.launched(2, [b])
    assert slots.distrust(2) == [b]
    assert slots.distrust(2) == []
    assert slots.distrust(1) == [], "that one came back"
    assert slots.num_resident == 1
    slots.give_back(b)
    assert slots.take(b"b") == (b, True)
    assert slots.take(b"a") == (a, False)


@pytest.mark.parametrize("seed", range(20))
def test_references_and_contents_agree_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    slots = AdapterSlots(rng.randint(1, 4))
    held: list[int] = []
    content: dict[int, bytes] = {}
    for step in range(400):
        key = bytes([rng.randint(97, 102)])
        if rng.random() < 0.6 and slots.has_room(key):
            slot, must_load = slots.take(key)
            if must_load:
                assert slot not in held, "a slot in use is overwritten"
                content[slot] = key
                slots.launched(step, [slot])
                if rng.random() < 0.2:
                    lost = slots.distrust(step)
                    assert lost == [slot]
                    del content[slot]
            else:
                assert content[slot] == key, "what is found is something else"
            held.append(slot)
        elif held:
            slots.give_back(held.pop(rng.randrange(len(held))))
        slots.check_integrity(dict(Counter(held)))
    for slot in held:
        slots.give_back(slot)
    slots.check_integrity({})


def test_a_lost_reference_is_noticed() -> None:
    slots = AdapterSlots(2)
    slot, _ = slots.take(b"a")
    with pytest.raises(AssertionError, match="references"):
        slots.check_integrity({})
    slots.check_integrity({slot: 1})
