"""Responses: order, coalescing, exactly one final flag, under every race that the threads can have."""

from __future__ import annotations

import gc
import logging
import random
import threading
import time
import weakref
from typing import Any

import pytest

from cb_backend.contracts.errors import ErrorCode
from cb_backend.contracts.request import FinishReason
from cb_backend.serving.cancellation import CancellationPoller
from cb_backend.serving.live_request import LiveRequest
from tests.serving.fake_server import ResponseSender, TritonError, TritonModelException, text_of
from tests.serving.response_bench import Bench
from tests.waiting import WAIT_S, eventually

LENGTH = int(FinishReason.LENGTH)


def test_a_response_per_token_while_keeping_up(bench: Bench) -> None:
    live, sender = bench.open()
    for number, token in enumerate(b"abc"):
        live.answers[0].on_tokens((token,), 0)
        eventually(lambda expected=number + 1: len(sender.responses) == expected, "the token is sent")  # type: ignore[misc]
    live.answers[0].on_tokens((ord("d"),), LENGTH)
    sender.wait()
    assert [text_of(response) for response in sender.responses] == ["a", "b", "c", "d"]
    assert sender.outputs("finish_reason") == [b"None", b"None", b"None", b"length"]
    assert sender.outputs("num_output_tokens") == [1, 1, 1, 1]
    assert sender.outputs("num_input_tokens") == [7, 7, 7, 7]
    assert sender.final_count == 1


def test_a_slow_line_gets_fewer_and_longer_responses(bench: Bench) -> None:
    live, sender = bench.open()
    text = "the quick brown fox jumps over the lazy dog"
    sender.may_send.clear()
    live.answers[0].on_tokens((ord(text[0]),), 0)
    eventually(lambda: sender.is_sending, "the first response is on its way")
    for character in text[1:]:
        live.answers[0].on_tokens((ord(character),), 0)
    live.answers[0].on_tokens((ord("!"),), LENGTH)
    sender.may_send.set()
    sender.wait()
    assert [text_of(response) for response in sender.responses] == [text[0], text[1:] + "!"]
    assert sender.outputs("num_output_tokens") == [1, len(text)]


def test_without_streaming_there_is_one_response(bench: Bench) -> None:
    live, sender = bench.open(is_stream=False)
    for token in b"hello":
        live.answers[0].on_tokens((token,), 0)
    live.answers[0].on_tokens((), LENGTH)
    sender.wait()
    assert sender.text == "prompt hello"
    assert sender.outputs("num_output_tokens") == [5]
    assert len(sender.responses) == 1


def test_half_a_character_waits_and_the_final_response_may_be_empty(bench: Bench) -> None:
    live, sender = bench.open()
    for token in "é".encode():
        live.answers[0].on_tokens((token,), 0)
    live.answers[0].on_tokens((259,), int(FinishReason.STOP))  # </s>: counts, shows nothing
    sender.wait()
    assert sender.text == "é"
    assert sum(sender.outputs("num_output_tokens")) == 3
    assert sender.outputs("finish_reason")[-1] == b"stop"
    assert all(text_of(response) for response in sender.responses[:-1])


@pytest.mark.parametrize("is_stream", [True, False])
def test_stop_string_ends_the_request_at_the_engine_too(bench: Bench, is_stream: bool) -> None:
    live, sender = bench.open(is_stream=is_stream, stop=("cd",))
    for token in b"abcdefgh":
        live.answers[0].on_tokens((token,), 0)
    sender.wait()
    assert sender.text == ("" if is_stream else "prompt ") + "ab"
    assert sender.outputs("finish_reason")[-1] == b"stop"
    assert bench.cancelled == [live.request_id]
    live.answers[0].on_tokens((ord("z"),), 0)  # late tokens are harmless
    live.answers[0].on_tokens((ord("z"),), LENGTH)
    live.answers[0].on_error(ErrorCode.UNAVAILABLE, "late")
    assert sender.final_count == 1


@pytest.mark.parametrize(
    ("reason", "code"), [(FinishReason.ABORT, TritonError.UNAVAILABLE), (FinishReason.ERROR, TritonError.INTERNAL)]
)
def test_ends_without_an_answer_are_errors(bench: Bench, reason: FinishReason, code: int) -> None:
    live, sender = bench.open()
    live.answers[0].on_tokens((), int(reason))
    assert (sender.wait().error or (None,))[0] == code


def test_a_failed_send_ends_only_its_request(bench: Bench) -> None:
    live, sender = bench.open()
    _, neighbour = other = bench.open()
    sender.fails_to_send = True
    live.answers[0].on_tokens((ord("a"),), 0)
    assert (sender.wait().error or (None,))[0] == TritonError.INTERNAL
    assert bench.cancelled == [live.request_id]
    other[0].answers[0].on_tokens((ord("b"),), LENGTH)
    assert neighbour.wait().text == "b"


def test_a_line_that_does_not_move_holds_up_only_its_own_thread(bench: Bench) -> None:
    stuck, stuck_sender = bench.open()
    live, sender = bench.open()  # the next request: the other thread
    stuck_sender.may_send.clear()
    stuck.answers[0].on_tokens((ord("a"),), 0)
    eventually(lambda: stuck_sender.is_sending, "one thread waits")
    live.answers[0].on_tokens((ord("b"),), LENGTH)
    sender.wait()
    assert stuck_sender.responses == []
    stuck_sender.may_send.set()
    stuck.answers[0].on_tokens((), LENGTH)
    stuck_sender.wait()


def test_one_final_response_whatever_happens_at_once(bench: Bench) -> None:
    """Tokens, ends, errors, cancellations and a poller at the same time; the fake server records what goes wrong."""
    rng = random.Random(0)
    poller = CancellationPoller(bench.responder, bench.cancelled.extend)
    requests = [bench.open(send_s=rng.choice((0, 0.001))) for _ in range(120)]

    def engine(part: list[tuple[LiveRequest, ResponseSender]], seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(12):
            for live, sender in part:
                event = rng.random()
                if event < 0.8:
                    live.answers[0].on_tokens((rng.randrange(97, 123),), 0)
                elif event < 0.87:
                    live.answers[0].on_tokens((ord("z"),), LENGTH)
                elif event < 0.93:
                    live.answers[0].on_error(ErrorCode.UNAVAILABLE, "the engine stopped")
                else:
                    sender.cancel()

    threads = [threading.Thread(target=engine, args=(requests[index::3], index)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bench.responder.end_all(ErrorCode.UNAVAILABLE, "over")
    for _, sender in requests:
        sender.wait()
    poller.close()
    assert [sender.final_count for _, sender in requests] == [1] * len(requests)


def test_the_server_is_not_asked_about_a_request_while_its_final_flag_goes_out(bench: Bench) -> None:
    live, sender = bench.open()
    sender.ask_s = 0.05
    poller = CancellationPoller(bench.responder, bench.cancelled.extend)
    time.sleep(0.1)  # a question is on its way nearly all the time
    live.answers[0].on_tokens((ord("a"),), LENGTH)
    assert sender.wait().text == "a"
    poller.close()


def test_a_cancelled_request_is_ended_among_others_that_go_on(bench: Bench) -> None:
    requests = [bench.open() for _ in range(50)]
    poller = CancellationPoller(bench.responder, bench.cancelled.extend)
    requests[33][1].cancel()
    code, message = requests[33][1].wait().error or (None, "")
    assert (code, message) == (TritonError.CANCELLED, "Request was cancelled")
    eventually(lambda: bench.cancelled == [requests[33][0].request_id], "the engine is told too")
    assert bench.responder.num_live == 49
    poller.close()


@pytest.mark.parametrize("is_stream", [True, False])
def test_n_answers_share_one_line(bench: Bench, is_stream: bool) -> None:
    """The others start at the first answer's first token; the end comes with the last answer's."""
    started = threading.Event()
    live, sender = bench.open(is_stream=is_stream, start_others=started.set, n=3)
    assert not started.is_set()
    live.answers[0].on_tokens((ord("a"),), 0)
    assert started.wait(WAIT_S)
    live.answers[2].on_tokens((ord("c"), ord("d")), LENGTH)
    live.answers[0].on_tokens((), LENGTH)
    time.sleep(0.05)
    assert sender.final_count == 0
    live.answers[1].on_tokens((ord("b"),), LENGTH)
    sender.wait()
    prefix = "" if is_stream else "prompt "
    texts = [[element.decode() for element in all_of(response, "text_output")] for response in sender.responses]
    assert ["".join(pieces) for pieces in zip(*texts, strict=True)] == [prefix + text for text in ("a", "b", "cd")]
    assert len(sender.responses) == 1 or is_stream
    counts = [all_of(response, "num_output_tokens") for response in sender.responses]
    assert [sum(column) for column in zip(*counts, strict=True)] == [1, 1, 2]
    assert all_of(sender.responses[-1], "finish_reason") == [b"length"] * 3
    assert bench.responder.counts()["input_tokens"] == 7  # L4


@pytest.mark.parametrize("failure", ["error", "abort"])
def test_one_failing_answer_ends_the_request_and_the_others(bench: Bench, failure: str) -> None:
    live, sender = bench.open(n=3, start_others=lambda: None)
    live.answers[0].on_tokens((ord("a"),), 0)
    if failure == "error":
        live.answers[1].on_error(ErrorCode.UNAVAILABLE, "the queue is full")
    else:
        live.answers[1].on_tokens((), int(FinishReason.ABORT))
    code, _ = sender.wait().error or (None, "")
    assert code == TritonError.UNAVAILABLE
    assert set(bench.cancelled) >= {live.answers[0].request_id, live.answers[2].request_id}
    live.answers[2].on_tokens((ord("z"),), LENGTH)  # late news is harmless
    assert bench.responder.num_live == 0


def test_l1_a_cancelled_request_ends_all_its_answers(bench: Bench) -> None:
    live, sender = bench.open(n=4, start_others=lambda: None)
    poller = CancellationPoller(bench.responder, bench.cancelled.extend)
    sender.cancel()
    assert sender.wait().error == (TritonError.CANCELLED, "Request was cancelled")
    poller.close()
    assert set(bench.cancelled) == set(live.request_ids)
    assert len(live.request_ids) == 4


def test_a_stop_string_ends_one_answer_only(bench: Bench) -> None:
    live, sender = bench.open(n=2, stop=("x",), start_others=lambda: None)
    live.answers[1].on_tokens((ord("a"), ord("x")), 0)
    eventually(lambda: bool(bench.cancelled), "the engine is told")
    assert bench.cancelled == [live.answers[1].request_id]
    assert not live.is_ended
    live.answers[0].on_tokens((ord("b"),), LENGTH)
    sender.wait()
    assert all_of(sender.responses[-1], "finish_reason") == [b"length", b"stop"]


def all_of(response: Any, name: str) -> list[Any]:
    return list(response.tensors[name].tolist())


@pytest.mark.parametrize("end", ["answer", "error", "cancelled", "sending fails", "sending fails at the end"])
def test_s90_nothing_keeps_a_request_of_the_server_after_its_end(
    bench: Bench, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request stays until garbage is collected, which may be when the line to the server is gone."""
    # pytest keeps what is logged, with tracebacks and all that their frames refer to.
    monkeypatch.setattr(logging.getLogger("cb_backend.serving"), "disabled", True)
    live, sender = bench.open()
    poller = CancellationPoller(bench.responder, bench.cancelled.extend)
    responses = sender.responses
    live.answers[0].on_tokens((ord("a"),), 0)
    eventually(lambda: len(responses) == 1, "it runs")
    if end == "error":
        live.end(ErrorCode.UNAVAILABLE, "over")
    elif end == "cancelled":
        sender.cancel()
    else:
        sender.fails_to_send = "fails" in end
        live.answers[0].on_tokens((ord("b"),), 0 if end == "sending fails" else LENGTH)
    remembered = weakref.ref(sender)
    del sender
    gc.disable()
    try:
        eventually(lambda: remembered() is None, "nothing refers to it")
    finally:
        gc.enable()
        poller.close()
    assert live.is_closed


def test_s90_a_request_whose_final_flag_failed_twice_is_let_go_too(bench: Bench) -> None:
    live, sender = bench.open()
    remembered = weakref.ref(sender)

    def fail(response: Any = None, flags: int = 0) -> None:
        raise TritonModelException("no shared memory")

    sender.send = fail  # type: ignore[method-assign]
    live.answers[0].on_tokens((ord("a"),), 0)
    del sender
    eventually(lambda: remembered() is None, "nothing refers to it")
    assert live.is_closed
