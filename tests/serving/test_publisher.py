"""When metrics are published: before the last answer is seen, and never for more than a share of the time."""

from __future__ import annotations

import threading

from cb_backend.contracts.errors import ErrorCode
from cb_backend.contracts.request import FinishReason
from cb_backend.serving.housekeeping import Housekeeping
from cb_backend.serving.publisher import BURST_S, MAX_SHARE, Publisher
from tests.serving.response_bench import Bench

LENGTH = int(FinishReason.LENGTH)


class Clock:
    """Time that passes only where the test says so; each publication takes `cost_s`."""

    def __init__(self, cost_s: float) -> None:
        self.now = 0.0
        self.cost_s = cost_s
        self.times: list[float] = []

    def __call__(self) -> float:
        return self.now

    def publish(self) -> None:
        self.times.append(self.now)
        self.now += self.cost_s


def test_the_last_answer_is_published_before_its_client_sees_it(bench: Bench) -> None:
    seen: list[tuple[int, int, int]] = []
    lives = [bench.open() for _ in range(3)]
    bench.responder.on_idle = lambda: seen.append(
        (
            bench.responder.counts()["length"],
            sum(bench.responder.latencies.totals()["e2e_latency"][0]),
            sum(sender.final_count for _, sender in lives),
        )
    )
    for live, sender in lives:
        live.answers[0].on_tokens((ord("a"),), LENGTH)
        sender.wait()
    assert seen == [(3, 3, 2)]
    live, sender = bench.open()
    lives.append((live, sender))
    live.end(ErrorCode.UNAVAILABLE, "the engine stopped")
    sender.wait()
    assert seen[1:] == [(3, 3, 3)]
    assert bench.responder.counts()["unavailable"] == 1


def test_a_request_whose_error_cannot_be_sent_is_not_waited_for(bench: Bench) -> None:
    idle: list[int] = []
    bench.responder.on_idle = lambda: idle.append(1)
    live, sender = bench.open()
    sender.fails_to_send = True
    live.answers[0].on_tokens((ord("a"),), 0)
    sender.wait()
    assert idle == [1]


def test_publishing_at_once_has_its_share_and_no_more() -> None:
    clock = Clock(cost_s=0.002)
    publisher = Publisher(clock.publish, clock)
    for _ in range(20_000):  # a request each millisecond, one at a time
        clock.now += 0.001
        publisher.publish_if_cheap()
    spent = len(clock.times) * clock.cost_s
    assert clock.times[:3] == [0.001, 0.004, 0.007]  # a burst is free
    assert MAX_SHARE * clock.now * 0.9 < spent < MAX_SHARE * clock.now + BURST_S + clock.cost_s
    pauses = [later - sooner for sooner, later in zip(clock.times[-50:], clock.times[-49:], strict=False)]
    assert max(pauses) < 2 * clock.cost_s / MAX_SHARE


def test_the_regular_call_is_always_made_until_it_is_closed() -> None:
    clock = Clock(cost_s=1.0)
    publisher = Publisher(clock.publish, clock)
    publisher.publish()
    publisher.publish_if_cheap()
    publisher.publish()
    assert len(clock.times) == 2
    publisher.close()
    publisher.publish()
    publisher.publish_if_cheap()
    assert len(clock.times) == 2


def test_an_engine_that_falls_idle_while_that_is_told_is_told_again() -> None:
    housekeeping = Housekeeping.__new__(Housekeeping)  # without a server to look after
    housekeeping._wake, housekeeping._next_publish = threading.Event(), float("inf")
    told: list[bool] = []

    def publish() -> None:
        told.append(True)
        if len(told) == 1:
            housekeeping._wake_up()

    housekeeping._publisher = Publisher(publish)
    housekeeping._wake_up()
    for _ in range(3):
        housekeeping._publish_what_is_due()
    assert len(told) == 2


def test_a_failure_is_logged_and_not_raised() -> None:
    def fail() -> None:
        raise RuntimeError("the server is away")

    Publisher(fail).publish()
