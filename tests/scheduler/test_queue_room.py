"""What a queue that is nearly full tells front ends; what they make of it is in tests/front_end/test_queue_room.py."""

from __future__ import annotations

import pytest

from cb_backend.contracts.errors import UnavailableError
from cb_backend.contracts.queue_room import TOLD_BELOW, QueueRoom
from tests.fakes.engine import FakeEngine


def test_the_queue_says_how_many_it_takes() -> None:
    engine = FakeEngine(num_blocks=100, max_num_seqs=2, max_queue_size=3, max_queue_tokens=50)
    assert engine.scheduler.queue_room.num_requests == 5, "two slots and three places"
    engine.add(0, 4)
    engine.add(1, 4)
    engine.step()
    assert engine.scheduler.queue_room.num_requests == 3
    engine.add(2, 4)
    engine.add(3, 4)
    room = engine.scheduler.queue_room
    assert (room.num_requests, "max_queue_size is 3" in room.refusal) == (1, True)
    engine.add(4, 4)
    full = engine.scheduler.queue_room
    assert full.num_requests == 0
    with pytest.raises(UnavailableError) as refused:
        engine.add(5, 4)
    assert str(refused.value) == full.refusal, "the same words, whoever refuses"
    engine.run()
    assert FakeEngine(max_num_seqs=2, max_queue_size=TOLD_BELOW).scheduler.queue_room == QueueRoom(None)


@pytest.mark.parametrize(("num_requests", "told"), [(TOLD_BELOW - 1, TOLD_BELOW - 1), (TOLD_BELOW, None)])
def test_how_many_it_takes_is_told_as_long_as_they_are_few(num_requests: int, told: int | None) -> None:
    engine = FakeEngine(max_num_seqs=2, max_queue_size=num_requests - 2)
    assert engine.scheduler.queue_room.num_requests == told


@pytest.mark.parametrize("max_queue_size", [9, 1000])
def test_no_room_for_a_single_token_is_no_room(max_queue_size: int) -> None:
    engine = FakeEngine(num_blocks=100, max_num_seqs=1, max_queue_size=max_queue_size, max_queue_tokens=20)
    engine.add(0, 4)
    engine.step()
    engine.add(1, 20)
    room = engine.scheduler.queue_room
    assert room.num_requests == 0
    assert "20 tokens wait, 1 more would pass max_queue_tokens (20)" in room.refusal
