"""Clients that stop reading, on a server that lets a send wait for them: nobody else does, and the wait has an end."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cb_backend.contracts.errors import ErrorCode
from cb_backend.contracts.request import FinishReason
from cb_backend.serving.cancellation import CancellationPoller
from cb_backend.serving.live_request import LiveRequest
from cb_backend.serving.senders import Senders, Tally
from cb_backend.support.silence import SilenceClock
from tests.serving.fake_server import ResponseSender, TritonError
from tests.serving.response_bench import Bench
from tests.waiting import WAIT_S, eventually

LENGTH = int(FinishReason.LENGTH)
Opened = tuple[LiveRequest, ResponseSender]


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
    for live, _ in opened:
        live.answers[0].on_tokens((ord("!"),), LENGTH)
    for _, sender in good:
        assert sender.wait().text == "hello!"
    assert all(sender.final_count == 0 for _, sender in stuck)
    eventually(lambda: bench.responder.num_held_up == 6, "each of the six holds up a thread, and nobody else does")
    for _, sender in stuck:
        sender.may_send.set()
    for _, sender in stuck:
        assert sender.wait().text == "ahello!"
        assert len(sender.responses) <= 3, "what came meanwhile goes out at once"
    assert bench.cancelled == []
    assert bench.responder.counts()["length"] == 16
    eventually(lambda: num_threads() == 2 + 1, "the threads of two queues are left, and the watch")


def test_v7_a_client_that_does_not_read_is_given_up(tmp_path: Path) -> None:
    """Its request ends at the engine and is counted; the reason is what it gets if it reads after all."""
    bench = Bench(tmp_path, slow_reader_timeout_s=0.6)
    stuck, good = bench.open(), bench.open()
    stop_reading(stuck)
    eventually(lambda: bool(bench.cancelled), "its request is ended at the engine")
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
    eventually(lambda: stuck[1].is_sending, "a response waits")
    other[1].cancel()
    assert (other[1].wait().error or (None,))[0] == TritonError.CANCELLED
    bench.responder.end_all(ErrorCode.UNAVAILABLE, "stopping")
    poller.close()
    stuck[1].may_send.set()
    response = stuck[1].wait()
    assert (response.error or (None,))[0] == (None if at == "last" else TritonError.UNAVAILABLE)
    assert response.final_count == 1


def test_threads_and_their_counts_are_used_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = Senders._start, []
    monkeypatch.setattr(Senders, "_start", lambda self, index: started.append(index) or start(self, index))
    for _ in range(4):
        opened = [bench.open() for _ in range(3)]
        for each in opened:
            stop_reading(each)
        eventually(lambda: bench.responder.num_held_up >= 2, "threads are held up")
        for live, sender in opened:
            sender.may_send.set()
            live.answers[0].on_tokens((), LENGTH)
            sender.wait()
        eventually(lambda: bench.responder.num_held_up == 0, "all have come back")
    assert bench.responder.counts()["length"] == 12
    assert len(started) >= 8
    assert len(bench.responder.latencies.threads) < 2 + len(started), "the first round's serve the others too"


def test_closing_does_not_wait_for_a_client(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    stuck, good = bench.open(), bench.open()
    stop_reading(stuck)
    bench.responder.end_all(ErrorCode.UNAVAILABLE, "stopping")
    bench.responder.close()
    assert (good[1].final_count, stuck[1].final_count) == (1, 0)
    stuck[1].may_send.set()
    stuck[1].wait()
    eventually(lambda: num_threads() == 0, "its thread ends too")


def test_a_client_that_reads_again_while_all_is_closed_gets_its_end(bench: Bench) -> None:
    """Nobody else serves its queue any more when the thread that waited for it comes back."""
    stuck = bench.open()
    stop_reading(stuck)
    eventually(lambda: bench.responder.num_held_up == 1, "a thread is held up")
    bench.responder.end_all(ErrorCode.UNAVAILABLE, "stopping")
    closing = threading.Thread(target=bench.responder.close)
    closing.start()
    eventually(lambda: num_threads() == 1, "only the thread that waits is left")
    stuck[1].may_send.set()
    assert (stuck[1].wait().error or (None,))[0] == TritonError.UNAVAILABLE
    closing.join()
    eventually(lambda: num_threads() == 0, "that one ends too")


def test_closing_waits_for_the_thread_that_takes_over_a_queue(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was held up has come back and ended, and the new one has not been started yet."""
    start, serve, senders = Senders._start, bench.responder._senders._serve, bench.responder._senders
    is_starting, may_start, may_serve = threading.Event(), threading.Event(), threading.Event()

    def start_late(self: Senders, index: int) -> Any:
        is_starting.set()
        may_start.wait(WAIT_S)
        return start(self, index)

    def serve_late(live: LiveRequest, tally: Tally) -> None:
        if live is not other[0]:
            may_serve.wait(WAIT_S)
        serve(live, tally)

    monkeypatch.setattr("cb_backend.serving.senders.CLOSE_TIMEOUT_S", WAIT_S)
    stuck, other, queued = bench.open(), bench.open(), bench.open()  # the first and the last have one queue
    monkeypatch.setattr(Senders, "_start", start_late)
    stop_reading(stuck)
    assert is_starting.wait(WAIT_S)
    monkeypatch.setattr(senders, "_serve", serve_late)
    stuck[1].may_send.set()
    eventually(lambda: num_threads() == 2, "it has ended: the other queue's thread and the watch are left")
    bench.responder.end_all(ErrorCode.UNAVAILABLE, "stopping")
    closing = threading.Thread(target=bench.responder.close)
    closing.start()
    eventually(senders._stop.is_set, "the watch is told to end")
    may_start.set()
    closing.join(0.5)
    assert closing.is_alive(), "a request is still to be answered"
    may_serve.set()
    closing.join()
    assert (stuck[1].final_count, queued[1].final_count) == (1, 1)


def test_closing_gives_nobody_up_because_the_process_was_stopped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour is over when it wakes, and the thread that was sending has not run yet."""
    serve, senders = bench.responder._senders._serve, bench.responder._senders
    is_serving, may_serve, now = threading.Event(), threading.Event(), [0.0]

    def serve_late(live: LiveRequest, tally: Tally) -> None:
        is_serving.set()
        may_serve.wait(WAIT_S)
        serve(live, tally)

    def sleep(_: float) -> None:  # the closing thread's: first of all it is stopped, then the other one runs
        if now[0] == 0.0:
            now[0] = 3600.0
        else:
            may_serve.set()
            sender.wait()

    senders._clock = SilenceClock(lambda: now[0])
    monkeypatch.setattr(senders, "_serve", serve_late)
    live, sender = bench.open()
    live.answers[0].on_tokens((ord("a"),), LENGTH)
    assert is_serving.wait(WAIT_S)
    monkeypatch.setattr("cb_backend.serving.senders.time", SimpleNamespace(sleep=sleep))
    senders.close()
    assert sender.final_count == 1


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
        expected = 1 + number // 4
        eventually(lambda expected=expected: len(sender.responses) == expected, "the response")  # type: ignore[misc]
    live.answers[0].on_tokens((ord("l"),), LENGTH)
    assert sender.wait().text == "abcdefghijkl"
    assert [response.tensors["num_output_tokens"].tolist() for response in sender.responses] == [[1], [4], [4], [3]]
    bench.responder.close()
