"""Processes that live and do not run; errors of our own on threads. pytest tests/front_end/test_watchdog.py"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from cb_backend.contracts.errors import ErrorCode
from cb_backend.front_end.engines import engine_client
from cb_backend.front_end.engines.engine_client import EngineClient
from cb_backend.front_end.engines.supervisor import EngineSupervisor
from tests.fakes.counting_runner import HANGING_TOKEN
from tests.front_end.engines import Sink, answer, counting_config, submit
from tests.front_end.fleet import LONG, Fleet, engine_pid, fleet, running
from tests.waiting import eventually

__all__ = ["fleet"]  # a fixture


PATIENT = counting_config(watchdog_timeout_s=3600.0)


def allow_silence(supervisor: EngineSupervisor, seconds: float) -> None:
    """How long its engine may be silent from now on: little only when the test knows that it is."""
    for member in supervisor.client.members:
        member._watchdog_timeout_s = seconds


def test_v6_an_engine_that_hangs_is_ended_and_replaced(fleet: Fleet) -> None:
    member, other = fleet.add(PATIENT), fleet.add(PATIENT)
    _, neighbour = submit(other, [7], LONG)
    neighbour.wait_for_token()
    hung_pid = engine_pid(member)
    _, hung = submit(member, [HANGING_TOKEN], 5)
    for each in (member, other):
        eventually(lambda each=each: each.client.silence_s > 1.0, "the silence is noticed")
    for each in (member, other):
        allow_silence(each, 2.0)
    for sink in (hung, neighbour):
        code, message = sink.wait().error or (None, "")
        assert code == ErrorCode.UNAVAILABLE
        assert "send the request again" in message
        assert sink.num_ends == 1
    messages = {str(sink.error) for sink in (hung, neighbour)}
    assert any("no progress for 2 s" in message for message in messages), messages
    for each in (member, other):
        allow_silence(each, 3600.0)
        eventually(lambda each=each: each.client.is_ready and engine_pid(each) != hung_pid, "the engine is back")
        assert answer(each, [40], 2) == [41, 42]


def test_silence_is_told_before_the_engine_is_ended(fleet: Fleet) -> None:
    member = fleet.add(PATIENT)
    _, sink = submit(member, [7], 1000)
    sink.wait_for_token()
    eventually(lambda: member.client.silence_s < 1.0, "it speaks")
    os.kill(engine_pid(member), signal.SIGSTOP)
    try:
        eventually(lambda: member.client.silence_s > 1.0, "the silence is noticed")
    finally:
        os.kill(engine_pid(member), signal.SIGCONT)
    fleet.hurry.touch()
    assert sink.wait().error is None, "a pause below the limit costs nothing"
    assert sink.token_ids == [(8 + i) % 256 for i in range(1000)]
    eventually(lambda: member.client.silence_s == 0.0, "without requests nothing is expected of it")


def test_an_idle_engine_may_be_silent(fleet: Fleet) -> None:
    member = fleet.add(PATIENT)
    pid = engine_pid(member)
    allow_silence(member, 0.1)
    time.sleep(1.5)  # several looks of the watchdog
    allow_silence(member, 3600.0)
    assert answer(member, [40], 2) == [41, 42]
    assert engine_pid(member) == pid


def test_requests_of_a_front_end_that_does_not_run_are_ended(fleet: Fleet) -> None:
    survivor = fleet.add(counting_config(max_num_seqs=4, watchdog_timeout_s=6.0))
    program = (
        "import os, pathlib\n"
        "from tests.front_end.engines import *\n"
        f"base, server_pid = pathlib.Path({str(fleet.base)!r}), {os.getpid()}\n"
        "supervisor = make_supervisor(counting_config(max_num_seqs=4, watchdog_timeout_s=6.0), base, server_pid)\n"
        "supervisor.start()\n"
        f"sinks = [submit(supervisor, [1], {LONG})[1] for _ in range(4)]\n"
        "[sink.wait_for_token() for sink in sinks]\n"
        "print('running', flush=True)\n"
        "print([sink.wait().error for sink in sinks], answer(supervisor, [50], 2), flush=True)\n"
        "supervisor.close()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "running\n"
        pid = engine_pid(survivor)
        other.send_signal(signal.SIGSTOP)
        eventually(lambda: running(survivor) == 0, "the silent front end's requests are gone")
        assert answer(survivor, [50], 2) == [51, 52]
        other.send_signal(signal.SIGCONT)
        last_line = other.stdout.readline()
        assert last_line.count("did not run for 6 s") == 4, last_line
        assert last_line.endswith("[51, 52]\n"), "it serves again"
        assert engine_pid(survivor) == pid
    finally:
        other.kill()
        other.wait()


class BrokenSink(Sink):
    def on_tokens(self, token_ids: tuple[int, ...], finish_reason: int, logprobs: Any = ()) -> None:
        raise RuntimeError("a sink with a bug")


def test_a_sink_that_raises_ends_alone(fleet: Fleet) -> None:
    member = fleet.add()
    _, neighbour = submit(member, [20], 60)
    _, broken = submit(member, [1], LONG, BrokenSink())
    code, _ = broken.wait().error or (None, "")
    assert code == ErrorCode.INTERNAL
    assert neighbour.wait().token_ids == [21 + i for i in range(60)]
    eventually(lambda: running(member) == 0, "the engine does not go on with the broken one's request")
    assert broken.num_ends == 1


def failing_once(
    real: Callable[..., Any], is_time: Callable[..., bool] = lambda *given: True
) -> tuple[Callable[..., Any], threading.Event]:
    """`real`, but the first call for which `is_time` raises; and the event that it has."""
    has_failed = threading.Event()

    def call(*given: Any) -> Any:
        if not has_failed.is_set() and is_time(*given):
            has_failed.set()
            raise RuntimeError("a bug of ours")
        return real(*given)

    return call, has_failed


def test_an_error_on_the_io_thread_ends_the_requests_and_not_the_thread(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = fleet.add()
    pid = engine_pid(member)
    decode, _ = failing_once(engine_client.decode_engine_message)
    sinks = [submit(member, [7], LONG)[1] for _ in range(3)]
    for sink in sinks:
        sink.wait_for_token()
    monkeypatch.setattr(engine_client, "decode_engine_message", decode)
    for sink in sinks:
        code, message = sink.wait().error or (None, "")
        assert code == ErrorCode.UNAVAILABLE
        assert "line to the engine broke" in message
        assert sink.num_ends == 1
    eventually(lambda: member.client.is_ready, "the line is there again")
    assert answer(member, [40], 2) == [41, 42]
    eventually(lambda: running(member) == 0, "the engine has dropped the requests of the broken line")
    assert engine_pid(member) == pid, "the engine was not to blame"


def test_an_error_on_the_io_thread_at_the_engines_end_loses_neither(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is set up to an engine that is gone; that is noticed, and the engine is started again."""
    member = fleet.add()
    pid = engine_pid(member)
    end_life, has_failed = failing_once(EngineClient._end_life)
    monkeypatch.setattr(EngineClient, "_end_life", end_life)
    _, sink = submit(member, [7], LONG)
    sink.wait_for_token()
    os.kill(pid, signal.SIGKILL)
    code, _ = sink.wait().error or (None, "")
    assert code == ErrorCode.UNAVAILABLE
    assert has_failed.is_set()
    assert sink.num_ends == 1
    eventually(lambda: member.client.is_ready, "the engine is started again")
    assert answer(member, [40], 2) == [41, 42]
    assert engine_pid(member) != pid
