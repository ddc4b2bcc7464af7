"""The queue by itself: turns of tenants stay true while requests come and go, and the hint of a refusal."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import UnavailableError
from cb_backend.contracts.request import Request, RequestStatus
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.scheduler.fair_share import FairShare
from cb_backend.engine.scheduler.order import Deadlines, RequestQueue


def make_request(request_id: int, length: int = 4, **scheduling: Any) -> Request:
    params = SchedulingParams(**scheduling)
    return Request(request_id, np.zeros(length, np.int32), length, TokenRules(), (), length + 8, scheduling=params)


def add(queue: RequestQueue, request_id: int, tenant: str = "", priority: int = 0, length: int = 4) -> Request:
    request = make_request(request_id, length, tenant=tenant, priority=priority)
    queue.arrive(request, num_free_slots=0, num_free_tokens=0)
    return request


def make_queue(max_size: int = 100, is_fair: bool = True, **arguments: Any) -> RequestQueue:
    config = EngineConfig(model="m", max_queue_size=max_size, max_queue_tokens=10_000, **arguments)
    return RequestQueue(config, FairShare(), is_fair)


def ids(requests: list[Request]) -> list[int]:
    return [request.request_id for request in requests]


def test_tenants_take_turns_unless_places_are_all_there_is() -> None:
    for is_fair, expected in ((True, [0, 3, 1, 2]), (False, [0, 1, 2, 3])):
        queue = make_queue(is_fair=is_fair)
        for number in range(3):
            add(queue, number, "flood")
        add(queue, 3, "small")
        assert ids(queue.first(8)) == expected


def test_whoever_has_left_is_not_among_the_first_and_whoever_came_is() -> None:
    queue = make_queue()
    for number, tenant in enumerate("abc"):
        add(queue, number, tenant)
    assert ids(queue.first(3)) == [0, 1, 2]
    preempted = queue.remove(0)
    assert preempted is not None
    assert ids(queue.first(3)) == [1, 2]
    queue.put_back(preempted)
    queue.remove(1)
    assert ids(queue.first(3)) == [0, 2]


def test_a_turn_that_was_charged_changes_the_order() -> None:
    share = FairShare()
    queue = RequestQueue(EngineConfig(model="m"), share)
    requests = [add(queue, number, tenant) for number, tenant in enumerate("abab")]
    assert ids(queue.first(4)) == [0, 1, 2, 3]
    queue.start(requests[0])
    share.start(requests[0], 100.0)
    assert ids(queue.first(4)) == [1, 3, 2]
    share.end(requests[0], 0, has_started=True)  # cancelled before anything was computed: nothing to pay for
    assert ids(queue.first(4)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("reserved_share", "reserved_priority", "found", "found_without"),
    [(0.5, -2, [0], [0]), (0.5, -1, [0, 2], [0]), (0.5, 0, [0, 2], [0, 1]), (0.5, 1, [0], [0]), (0.0, 0, [0], [0])],
)
def test_the_first_who_has_a_share_is_a_candidate_wherever_he_stands(
    reserved_share: float, reserved_priority: int, found: list[int], found_without: list[int]
) -> None:
    queue = make_queue(reserved_share=reserved_share, reserved_priority=reserved_priority)
    add(queue, 0, priority=1)
    queue.now = 100.0
    add(queue, 1, priority=0)
    add(queue, 2, priority=-1)
    assert ids(queue.candidates(1)) == found
    queue.remove(2)
    assert ids(queue.candidates(1)) == found_without


def test_nobody_has_a_share_where_places_are_all_there_is() -> None:
    queue = make_queue(is_fair=False, reserved_share=0.5, reserved_priority=0)
    requests = [add(queue, number, priority=priority) for number, priority in enumerate((5, -5))]
    assert ids(queue.candidates(1)) == [1]
    assert not queue.has_share_apart(requests[1], requests[0])


@pytest.mark.parametrize(("seconds_each", "hint"), [(0.0, 1), (20.0, 60)])
def test_the_hint_when_to_come_back_is_between_a_second_and_a_minute(seconds_each: float, hint: int) -> None:
    queue = make_queue(max_size=50)
    for number in range(50):
        add(queue, number)
    for number in range(20):
        queue.now += seconds_each
        queue.start(queue.first(1)[0])
        add(queue, 100 + number)
    with pytest.raises(UnavailableError, match=rf"try again in about {hint} s"):
        add(queue, 1000)


def test_deadlines_are_swept_when_most_of_their_requests_have_ended_and_not_before() -> None:
    deadlines = Deadlines(EngineConfig(model="m", timeout_ms=1000))
    requests = [make_request(number) for number in range(1025)]
    for request in requests:
        deadlines.add(request)
    for request in requests[:500]:
        request.status = RequestStatus.FINISHED_ABORTED
    deadlines.add(make_request(2000))
    assert len(deadlines) == 1026, "swept for few, and again with every request that comes"
    for request in requests:
        request.status = RequestStatus.FINISHED_ABORTED
    for number in range(1025):
        deadlines.add(make_request(3000 + number))
    assert len(deadlines) == 1026, "those that have ended are kept"


def test_a_sweep_keeps_whoever_can_still_be_late_in_the_order_of_time_and_arrival() -> None:
    rng, deadlines = random.Random(0), Deadlines(EngineConfig(model="m"))
    requests = [make_request(number, timeout_ms=rng.randint(1, 100)) for number in range(1025)]
    for request in requests[:-1]:
        deadlines.add(request)
    for number, request in enumerate(requests[:900]):
        if number % 3:
            request.status = RequestStatus.RUNNING if number % 3 == 1 else RequestStatus.FINISHED_STOPPED
    deadlines.add(requests[-1])
    watched = [request for request in requests if not request.status.is_finished]
    assert len(deadlines) == len(watched) == 725
    late = []
    for request, _ in deadlines.due(1.0):
        request.status = RequestStatus.FINISHED_ABORTED
        late.append(request)
    assert late == sorted(watched, key=lambda request: (request.scheduling.timeout_ms, request.request_id))


def test_a_held_request_is_in_no_line_until_it_is_released() -> None:
    queue = make_queue(enable_lora=True)
    add(queue, 0)
    held = make_request(1)
    queue.arrive(held, num_free_slots=0, num_free_tokens=0, is_held=True)
    assert (ids(queue.first(8)), ids(queue.first_of_adapters(lambda key: True)), len(queue)) == ([0], [0], 1)
    assert (queue.num_waiting, queue.num_tokens) == (2, 8)
    queue.release(7)
    queue.remove(0)
    assert (queue.head, queue.first_of_adapters(lambda key: True)) == (None, [])
    queue.release(1)
    assert (queue.head, queue.first_of_adapters(lambda key: True), len(queue)) == (held, [held], 1)
    queue.release(1)
    assert ids(queue.first(8)) == [1], "once"


def test_a_held_request_that_leaves_is_in_no_line() -> None:
    queue = make_queue(enable_lora=True)
    queue.arrive(make_request(1), num_free_slots=0, num_free_tokens=0, is_held=True)
    queue.remove(1)
    queue.release(1)
    assert (queue.num_waiting, len(queue), queue.num_tokens, queue.head) == (0, 0, 0, None)


def test_the_first_of_each_adapter_that_can_start_and_of_none() -> None:
    queue = make_queue(enable_lora=True)
    for number, adapter in enumerate([b"x", b"x", b"", b"y", b"", b"z"]):
        request = make_request(number)
        request.adapter = adapter
        queue.arrive(request, num_free_slots=0, num_free_tokens=0)
    assert ids(queue.first_of_adapters(lambda key: key != b"y")) == [0, 2, 5]
    assert ids(queue.first_of_adapters(lambda key: False)) == [2], "those of no adapter need no place"
    queue.remove(2)
    queue.remove(0)
    assert ids(queue.first_of_adapters(lambda key: True)) == [1, 3, 4, 5]


def test_a_request_is_due_after_its_milliseconds_and_not_before() -> None:
    deadlines = Deadlines(EngineConfig(model="m", timeout_ms=1000))
    request = make_request(1)
    request.arrival_time, request.status = 5.0, RequestStatus.RUNNING
    deadlines.add(request)
    assert list(deadlines.due(5.9999)) == []
    assert [found for found, _ in deadlines.due(6.0)] == [request]
