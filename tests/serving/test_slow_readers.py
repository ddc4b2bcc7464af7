"""Clients that stop reading, on a server that lets a send wait for them: nobody else does, and the wait has an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cb_backend.errors import ErrorCode
from cb_backend.request import FinishReason
from cb_backend.serving.cancellation import CancellationPoller
from cb_backend.serving.live_request import LiveRequest
from tests.serving.fake_server import ResponseSender, TritonError
from tests.serving.response_bench import Bench

LENGTH = int(FinishReason.LENGTH)
Opened = tuple[LiveRequest, ResponseSender]


def until(is_true: Callable[[], bool], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not is_true():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


def stop_reading(opened: Opened) -> None:
    live, sender = opened
    sender.may_send.clear()
    live.answers[0].on_tokens((ord("a"),), 0)


def num_threads() -> int:
    return sum(thread.name.startswith("sender-") for thread in threading.enumerate())


def test_v7_nobody_waits_for_clients_that_do_not_read(bench: Bench) -> None:
    """Case V7: six of sixteen do not read, on two sender threads; when they read again they get the rest, in order."""
    opened = [bench.open() for _ in range(16)]
    stuck, good = opened[:6], opened[6:]
    for each in stuck:
        stop_reading(each)
    for text in "hello":
        for live, _ in opened:
            live.answers[0].on_tokens((ord(text),), 0)
        time.sleep(0.01)
    for live, _ in opened:
        live.answers[0].on_tokens((ord("!"),), LENGTH)
    for _, sender in good:
        assert sender.wait(8).text == "hello!"
    assert all(sender.final_count == 0 for _, sender in stuck)
    assert bench.responder.num_held_up == 6
    for _, sender in stuck:
        sender.may_send.set()
    for _, sender in stuck:
        assert sender.wait().text == "ahello!"
        assert len(sender.responses) <= 3, "what came meanwhile goes out at once"
    assert bench.cancelled == []
    assert bench.responder.counts()["length"] == 16
    until(lambda: bench.responder.num_held_up == 0)
    assert num_threads() == 2 + 1  # and the watch


def test_v7_a_client_that_does_not_read_is_given_up(tmp_path: Path) -> None:
    """Its request ends at the engine and is counted; the reason is what it gets if it reads after all."""
    bench = Bench(tmp_path, slow_reader_timeout_s=0.6)
    stuck, good = bench.open(), bench.open()
    stop_reading(stuck)
    until(lambda: bool(bench.cancelled))
    assert bench.cancelled == [stuck[0].request_id]
    assert bench.responder.counts()["slow_readers"] == 1
    assert stuck[0].is_ended
    stuck[1].may_send.set()
    code, message = stuck[1].wait().error or (None, "")
    assert code == TritonError.CANCELLED
    assert message == "the client has not read its responses for 0.6 s, so the request was ended"
    good[0].answers[0].on_tokens((ord("b"),), LENGTH)
    assert good[1].wait().text == "b"
    assert bench.responder.counts()["cancelled"] == 1
    bench.responder.close()


@pytest.mark.parametrize("at", ["first", "last"])
def test_the_poller_and_the_end_of_all_do_not_wait_either(bench: Bench, at: str) -> None:
    """Neither where the response that waits is the final one."""
    poller = CancellationPoller(bench.responder, bench.cancelled.extend)
    stuck, other = bench.open(), bench.open()
    stuck[1].may_send.clear()
    stuck[0].answers[0].on_tokens((ord("a"),), LENGTH if at == "last" else 0)
    time.sleep(0.1)
    other[1].cancel()
    assert (other[1].wait().error or (None,))[0] == TritonError.CANCELLED
    bench.responder.end_all(ErrorCode.UNAVAILABLE, "stopping")
    poller.close()
    stuck[1].may_send.set()
    response = stuck[1].wait()
    assert (response.error or (None,))[0] == (None if at == "last" else TritonError.UNAVAILABLE)
    assert response.final_count == 1


def test_threads_and_their_counts_are_used_again(bench: Bench) -> None:
    for _ in range(4):
        opened = [bench.open() for _ in range(3)]
        for each in opened:
            stop_reading(each)
        until(lambda: bench.responder.num_held_up >= 2)
        for live, sender in opened:
            sender.may_send.set()
            live.answers[0].on_tokens((), LENGTH)
            sender.wait()
        until(lambda: bench.responder.num_held_up == 0)
    assert bench.responder.counts()["length"] == 12
    assert len(bench.responder.latencies.threads) <= 2 + 3 + 1


def test_closing_does_not_wait_for_a_client(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    stuck, good = bench.open(), bench.open()
    stop_reading(stuck)
    bench.responder.end_all(ErrorCode.UNAVAILABLE, "stopping")
    begin = time.monotonic()
    bench.responder.close()
    assert good[1].final_count == 1
    assert time.monotonic() - begin < 10
    stuck[1].may_send.set()


def test_a_client_that_reads_again_while_all_is_closed_gets_its_end(bench: Bench) -> None:
    """Nobody else serves its queue any more when the thread that waited for it comes back."""
    stuck = bench.open()
    stop_reading(stuck)
    until(lambda: bench.responder.num_held_up == 1)
    bench.responder.end_all(ErrorCode.UNAVAILABLE, "stopping")
    closing = threading.Thread(target=bench.responder.close)
    closing.start()
    until(lambda: num_threads() == 1)  # the one that waits
    stuck[1].may_send.set()
    assert (stuck[1].wait().error or (None,))[0] == TritonError.UNAVAILABLE
    closing.join()
    assert num_threads() == 0


def test_a_thread_that_cannot_be_started_is_started_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = threading.Thread.start, [1, 1]

    def start_at_last(thread: threading.Thread) -> None:
        if failures and thread.name.startswith("sender-"):
            failures.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_at_last)
    stuck, other, good = bench.open(), bench.open(), bench.open()
    stop_reading(stuck)
    other[0].answers[0].on_tokens((ord("b"),), LENGTH)
    assert other[1].wait().text == "b"  # the other thread's
    good[0].answers[0].on_tokens((ord("c"),), LENGTH)
    assert good[1].wait().text == "c"
    assert not failures
    stuck[1].may_send.set()


def test_stream_interval_makes_fewer_responses(tmp_path: Path) -> None:
    bench = Bench(tmp_path, stream_interval=4)
    live, sender = bench.open()
    for number, text in enumerate("abcdefghijk"):
        live.answers[0].on_tokens((ord(text),), 0)
        until(lambda expected=1 + number // 4: len(sender.responses) == expected)  # type: ignore[misc]
    live.answers[0].on_tokens((ord("l"),), LENGTH)
    assert sender.wait().text == "abcdefghijkl"
    assert [response.tensors["num_output_tokens"].tolist() for response in sender.responses] == [[1], [4], [4], [3]]
    bench.responder.close()
