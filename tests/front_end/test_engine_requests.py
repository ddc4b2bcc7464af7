"""Requests of an engine process: cancelled, refused, late, failed. What ends one ends no other."""

from __future__ import annotations

import os

import zmq

from cb_backend.contracts.errors import ErrorCode, UnavailableError
from cb_backend.contracts.scheduling import SchedulingParams
from tests.fakes.counting_runner import FAILING_ROW_TOKEN, FAILING_STEP_TOKEN, KILLING_TOKEN, VOCAB_SIZE
from tests.front_end.engines import (
    Sink,
    answer,
    counting_config,
    is_running,
    submit,
)
from tests.front_end.fleet import LONG, Fleet, engine_pid, fleet, running
from tests.waiting import eventually

__all__ = ["fleet"]  # a fixture


def test_cancelled_request_leaves_the_engine(fleet: Fleet) -> None:
    member = fleet.add()
    request_id, sink = submit(member, [1], LONG)
    _, neighbour = submit(member, [20], 60)
    sink.wait_for_token()
    member.client.cancel([request_id, request_id, 12345])
    assert neighbour.wait().token_ids == [(21 + i) % 256 for i in range(60)]
    eventually(lambda: running(member) == 0, "nothing is left in the engine")
    member.client.cancel([request_id])  # after its end: ignored
    assert answer(member, [1], 1) == [2]
    assert sink.num_ends == 0


def test_bad_requests_are_refused_one_by_one(fleet: Fleet) -> None:
    member = fleet.add(counting_config(max_model_len=64))
    for prompt, reason in (([VOCAB_SIZE], "outside the vocabulary"), ([], "no tokens"), ([1] * 64, "max_model_len")):
        _, sink = submit(member, prompt, 1)
        code, message = sink.wait().error or (None, "")
        assert code == ErrorCode.INVALID_ARG
        assert reason in message
    assert answer(member, [1], 1) == [2]


def test_full_queue_refuses_as_unavailable(fleet: Fleet) -> None:
    member = fleet.add(counting_config(max_num_seqs=1, max_queue_size=1))
    _, sink = submit(member, [1], LONG)
    sink.wait_for_token()
    submit(member, [2], 1)
    _, refused = submit(member, [3], 1)
    code, message = refused.wait().error or (None, "")
    assert code == ErrorCode.UNAVAILABLE
    assert "queue is full" in message


def test_wish_36_timeouts_end_waiting_and_running_requests(fleet: Fleet) -> None:
    member = fleet.add(counting_config(max_num_seqs=1))
    running_id, running = submit(member, [1], LONG)
    running.wait_for_token()
    _, waiting = submit(member, [2], 1, scheduling=SchedulingParams(queue_timeout_ms=100))
    code, message = waiting.wait().error or (None, "")
    assert (code, "timed out after 100 ms in the queue" in message) == (ErrorCode.UNAVAILABLE, True)
    _, urgent = submit(member, [3], 2, scheduling=SchedulingParams(priority=-1))
    assert urgent.wait().token_ids == [4, 5], "the more urgent one takes the slot"
    _, limited = submit(member, [4], LONG, scheduling=SchedulingParams(priority=-1, timeout_ms=600))
    code, message = limited.wait().error or (None, "")
    assert (code, "timed out after 600 ms (timeout_ms)" in message) == (ErrorCode.UNAVAILABLE, True)
    assert (running.num_ends, running.error) == (0, None), "the one that gave way twice goes on"
    member.client.cancel([running_id])
    assert answer(member, [5], 1) == [6]


def test_failed_row_ends_only_its_request(fleet: Fleet) -> None:
    member = fleet.add()
    good = submit(member, [30], 40)[1]
    bad = submit(member, [FAILING_ROW_TOKEN, 1], 5)[1]
    assert bad.wait().finish_reason == 4  # FinishReason.ERROR
    assert good.wait().token_ids == [31 + i for i in range(40)]


def test_failed_step_ends_its_requests_and_three_in_a_row_the_engine(fleet: Fleet) -> None:
    member = fleet.add()
    old_pid = engine_pid(member)
    assert submit(member, [FAILING_STEP_TOKEN], 5)[1].wait().finish_reason == 4
    assert answer(member, [40], 2) == [41, 42]
    assert engine_pid(member) == old_pid
    for _ in range(3):
        sink = Sink()
        try:
            submit(member, [FAILING_STEP_TOKEN], 5, sink)
        except UnavailableError:
            break
        sink.wait()
    eventually(lambda: not is_running(old_pid), "the engine gave up")
    eventually(lambda: member.client.is_ready and engine_pid(member) != old_pid, "the engine is back")
    assert answer(member, [40], 2) == [41, 42]


def test_engine_that_dies_in_a_step_is_replaced(fleet: Fleet) -> None:
    member = fleet.add()
    code, _ = submit(member, [KILLING_TOKEN], 5)[1].wait().error or (None, "")
    assert code == ErrorCode.UNAVAILABLE
    eventually(lambda: member.client.is_ready, "the engine is back")
    assert answer(member, [40], 2) == [41, 42]


def test_malformed_and_foreign_messages_are_ignored(fleet: Fleet) -> None:
    member = fleet.add()
    life = member.client.members[0].life
    assert life is not None
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as stranger:
            stranger.connect(f"ipc://{life.socket_path}")
            for frame in (b"", b"\x00" * 100, b"\x81\xa4type\xa5Hello", os.urandom(2000)):
                stranger.send(frame)
            stranger.send_multipart([b"two", b"frames"])
            assert answer(member, [40], 30) == list(range(41, 71))
    finally:
        context.destroy(linger=0)
