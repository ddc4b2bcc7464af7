"""Refusals by front ends that know of a full queue: early, right, counted, and never below the limits."""

from __future__ import annotations

import os
import signal
from collections import deque

import pytest

from cb_backend.contracts.errors import UnavailableError
from cb_backend.contracts.messages import AddRequest
from cb_backend.contracts.queue_room import KnownRoom, QueueRoom
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.front_end.engines.engine_client import EngineClient
from cb_backend.front_end.engines.supervisor import EngineSupervisor
from tests.front_end.engines import Sink, counting_config, submit
from tests.front_end.fleet import Fleet, engine_pid, fleet
from tests.simulation.network import SimulatedClient
from tests.waiting import eventually

__all__ = ["fleet"]  # a fixture

PLACES = 3  # one slot, and two that wait
ENDLESS = 15_000  # tokens: minutes, whatever a test has to wait for
TIGHT = counting_config(max_num_seqs=1, max_queue_size=PLACES - 1, max_model_len=ENDLESS + 200)


def is_full(supervisor: EngineSupervisor) -> bool:
    return all(member.room.is_full for member in supervisor.client.members)


def test_what_is_known_counts_down_and_is_forgotten() -> None:
    room = KnownRoom()
    room.take()
    assert not room.is_full, "nothing is known"
    room.told(QueueRoom(2, "full"))
    room.take()
    room.take()
    assert room.is_full
    assert [room.refuse(), room.refuse()] == ["full", "full"]
    room.give_back(1)
    assert not room.is_full
    room.take()
    room.take()
    assert room.is_full, "it cannot fall below none"
    room.forget()
    assert not room.is_full
    told = room.take_refused()
    assert told is not None
    assert told.num_requests == 2
    assert room.take_refused() is None, "told once"


def test_a_place_is_taken_before_the_engine_can_hear_of_the_request() -> None:
    """Afterwards the next telling, which has it in it, may have come already: the request would count twice."""
    client = SimulatedClient(1)
    client._is_ready = True
    client.room.told(QueueRoom(1, "full"))
    was_full = []

    class Outbox(deque[bytes]):
        def append(self, frame: bytes) -> None:
            was_full.append(client.room.is_full)
            super().append(frame)

    client._outbox = Outbox()
    client.submit(AddRequest(1, b"", TokenRules(seed=0)), Sink())
    client.give_back()
    assert was_full == [True]


def test_front_ends_refuse_by_themselves_while_the_queue_is_full(fleet: Fleet) -> None:
    first, second = fleet.add(TIGHT), fleet.add(TIGHT)
    running = [submit(first, [1], ENDLESS)[0] for _ in range(PLACES)]
    for member in (first, second):
        eventually(lambda member=member: is_full(member), "the front end knows that the queue is full")
        with pytest.raises(UnavailableError, match=r"the queue is full .*; try again in about \d+ s"):
            member.client.check_room()
    third = fleet.add(TIGHT)
    eventually(lambda: is_full(third), "one that comes later is told as well")
    stats = first.client.members[0]
    eventually(lambda: stats.stats is not None and stats.stats.num_refused == 2, "both refusals are counted")
    _, late = submit(second, [1], 1)
    assert "the queue is full" in str(late.wait().error), "the engine refuses what comes all the same"
    eventually(lambda: stats.stats is not None and stats.stats.num_refused == 3, "and counts it")
    os.kill(engine_pid(first), signal.SIGSTOP)  # from here on it tells nothing
    eventually(lambda: first.client.silence_s > 0.5, "what it has told is heard")
    first.client.cancel(running[:1])
    first.client.check_room()  # the place of one's own request is free at once
    os.kill(engine_pid(first), signal.SIGCONT)
    for member in (second, third):
        eventually(lambda member=member: not is_full(member), "the others are told")
        member.client.check_room()
    first.client.cancel(running)


def test_what_fits_is_never_refused(fleet: Fleet) -> None:
    """Each burst takes every place and begins when the last answer of the one before has come."""
    member = fleet.add(TIGHT)
    for burst in range(30):
        sinks = []
        for _ in range(PLACES):
            member.client.check_room()
            sinks.append(submit(member, [burst], 1 + burst % 3)[1])
        for sink in sinks:
            assert sink.wait().error is None


def has_heard_of(member: EngineClient, num_running: int, num_waiting: int) -> bool:
    stats = member.stats
    return stats is not None and (stats.num_running, stats.num_waiting) == (num_running, num_waiting)


def test_requests_pass_by_an_engine_that_is_full(fleet: Fleet) -> None:
    """By its prefix and the loads the fourth request would go where the first two are, who take all places there."""
    member = fleet.add(
        counting_config(data_parallel_size=2, max_num_seqs=1, max_queue_size=1, max_model_len=ENDLESS + 200)
    )
    eventually(lambda: all(m.is_ready for m in member.client.members), "both engines are there")
    prefix = [9] * 64
    submitted = [submit(member, prefix, ENDLESS), submit(member, prefix, ENDLESS)]
    assert sorted(m.load for m in member.client.members) == [0, 2]
    # Not by its own count alone: what the engine told before the second had come is heard after that.
    eventually(lambda: any(m.room.is_full and has_heard_of(m, 1, 1) for m in member.client.members), "one is full")
    submitted += [submit(member, prefix, ENDLESS), submit(member, prefix, ENDLESS)]
    assert [m.load for m in member.client.members] == [2, 2]
    eventually(lambda: is_full(member), "both are full")
    with pytest.raises(UnavailableError, match="the queue is full"):
        member.client.check_room()
    assert [sink.error for _, sink in submitted] == [None] * 4
    member.client.cancel([request_id for request_id, _ in submitted])
