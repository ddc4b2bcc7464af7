"""One engine process for several front ends: started once, started again after a crash, ended with the last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cb_backend.contracts.errors import ConfigError, ErrorCode, UnavailableError
from cb_backend.front_end.engines import engine_client, engine_keeper
from cb_backend.support.child_environment import child_environment
from tests.front_end.engines import (
    Sink,
    answer,
    counting_config,
    is_running,
    submit,
)
from tests.front_end.fleet import LONG, Fleet, engine_pid, fleet, running
from tests.waiting import WAIT_S, eventually

__all__ = ["fleet"]  # a fixture


def test_one_engine_serves_four_front_ends(fleet: Fleet) -> None:
    members = [fleet.add() for _ in range(4)]
    assert len({engine_pid(member) for member in members}) == 1
    assert [member.is_owner for member in members] == [True, False, False, False]
    assert len({member.client.front_end_id for member in members}) == 4
    sinks = [submit(member, [10 * index], 20)[1] for index, member in enumerate(members) for _ in range(5)]
    for number, sink in enumerate(sinks):
        first = 10 * (number // 5) + 1
        assert sink.wait().token_ids == list(range(first, first + 20))
        assert sink.num_ends == 1


def test_engine_ends_with_its_last_front_end(fleet: Fleet) -> None:
    first, second = fleet.add(), fleet.add()
    pid = engine_pid(first)
    first.close()
    eventually(lambda: second.is_owner, "the other front end takes over")
    assert is_running(pid)
    assert answer(second, [1], 3) == [2, 3, 4]
    second.close()
    assert not is_running(pid)


def test_killed_engine_fails_open_requests_and_is_started_again(fleet: Fleet) -> None:
    members = [fleet.add(), fleet.add()]
    sinks = [submit(member, [7], LONG)[1] for member in members for _ in range(4)]
    for sink in sinks:
        sink.wait_for_token()
    old_pid = engine_pid(members[0])
    fleet.gate.touch()
    os.kill(old_pid, signal.SIGKILL)
    for sink in sinks:
        code, message = sink.wait().error or (None, "")
        assert code == ErrorCode.UNAVAILABLE
        assert "send the request again" in message
        assert sink.num_ends == 1
    with pytest.raises(UnavailableError, match="being started again"):
        submit(members[0], [7], 1)
    fleet.gate.unlink()
    for member in members:
        eventually(lambda member=member: member.client.is_ready, "the engine is back")
        assert answer(member, [100], 3) == [101, 102, 103]
    assert engine_pid(members[0]) == engine_pid(members[1]) != old_pid


def test_front_end_that_takes_over_restarts_the_engine_too(fleet: Fleet) -> None:
    owner, heir = fleet.add(), fleet.add()
    owner.close()
    eventually(lambda: heir.is_owner, "the other front end takes over")
    fleet.gate.touch()
    os.kill(engine_pid(heir), signal.SIGKILL)
    eventually(lambda: not heir.client.is_ready, "the end is noticed")
    fleet.gate.unlink()
    eventually(lambda: heir.client.is_ready, "the engine is back")
    assert answer(heir, [100], 2) == [101, 102]


def test_requests_of_a_dead_front_end_are_aborted(fleet: Fleet) -> None:
    survivor = fleet.add(counting_config(max_num_seqs=4))
    program = (
        "import sys, time, pathlib\n"
        "from tests.front_end.engines import *\n"
        f"base, server_pid = pathlib.Path({str(fleet.base)!r}), {os.getpid()}\n"
        "supervisor = make_supervisor(counting_config(max_num_seqs=4), base, server_pid)\n"
        "supervisor.start()\n"
        f"sinks = [submit(supervisor, [1], {LONG})[1] for _ in range(4)]\n"
        "[sink.wait_for_token() for sink in sinks]\n"
        "print('running', flush=True)\n"
        "time.sleep(3600)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"running\n"
        eventually(lambda: running(survivor) == 4, "all four run")
        _, queued = submit(survivor, [50], 2)  # no slot is free for it until the dead one's are
        other.kill()
        assert queued.wait().token_ids == [51, 52]
        eventually(lambda: running(survivor) == 0, "the dead front end's requests are gone")
    finally:
        other.kill()
        other.wait()


def test_config_error_is_the_reason_of_the_failed_start(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match=r"'no-such-model' does not exist; set model to a folder"):
        fleet.add(counting_config(model="no-such-model"))


def test_the_reason_of_a_failed_start_is_heard_though_the_engine_has_ended(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads its last words may not run before the one that notices its end."""
    real, may_read, reasons = engine_client.decode_engine_message, threading.Event(), []

    def read_late(frame: bytes) -> object:
        assert may_read.wait(WAIT_S)
        return real(frame)

    def add() -> None:
        with pytest.raises(ConfigError) as caught:
            fleet.add(counting_config(model="no-such-model"))
        reasons.append(str(caught.value))

    monkeypatch.setattr(engine_client, "decode_engine_message", read_late)
    adding = threading.Thread(target=add, daemon=True)
    adding.start()
    eventually(lambda: bool(fleet.members and fleet.members[0].client.members[0].life), "an engine is being started")
    pid = engine_pid(fleet.members[0])
    eventually(lambda: not is_running(pid), "it has ended")
    time.sleep(0.5)  # several looks of the thread that notices
    may_read.set()
    adding.join()
    assert "'no-such-model' does not exist" in reasons[0]


def test_closing_does_not_wait_for_an_engine_that_is_still_starting(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has heard no goodbye and would wait for front ends to come."""
    waits: list[float] = []
    wait = engine_keeper._wait_for_end
    monkeypatch.setattr(engine_keeper, "_wait_for_end", lambda watch, limit: waits.append(limit) or wait(watch, limit))
    member = fleet.add()
    old_pid = engine_pid(member)
    fleet.gate.touch()
    os.kill(old_pid, signal.SIGKILL)
    eventually(lambda: engine_pid(member) != old_pid, "the next one is being started")
    new_pid = engine_pid(member)
    member.close()
    assert not is_running(new_pid)
    assert engine_keeper.ENGINE_EXIT_TIMEOUT_S not in waits


def test_engine_that_cannot_start_again_yet_is_tried_until_it_can(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstacle = tmp_path / "obstacle"
    monkeypatch.setenv("CB_TEST_OBSTACLE", str(obstacle))
    monkeypatch.setattr("cb_backend.front_end.engines.engine_keeper.FIRST_RESTART_DELAY_S", 0.1)
    member = fleet.add()
    obstacle.touch()
    os.kill(engine_pid(member), signal.SIGKILL)
    eventually(lambda: "taken" in (member.client.failure or ""), "the second engine says why it cannot start")
    with pytest.raises(UnavailableError, match="being started again"):
        submit(member, [7], 1)
    obstacle.unlink()
    eventually(lambda: member.client.is_ready, "the engine is back")
    assert answer(member, [100], 2) == [101, 102]


def test_lack_of_memory_is_one_line_with_a_remedy(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match=r"not enough memory to start \(.*\); lower max_num_seqs \(100000000000\)"):
        fleet.add(counting_config(max_num_seqs=10**11))


def test_interpreter_that_is_not_there_fails_the_start(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match=r"interpreter /no/python cannot be started \(No such file.*engine_python"):
        fleet.add(counting_config(engine_python="/no/python"))


def test_death_during_the_start_fails_it(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match="exit code 7 before it was ready"):
        fleet.add(counting_config(model="dies-at-start"))


def test_engine_ends_with_the_server(fleet: Fleet) -> None:
    server = subprocess.Popen(["sleep", "3600"])
    member = fleet.add(server_pid=server.pid)
    pid = engine_pid(member)
    server.kill()
    eventually(lambda: not is_running(pid), "the engine is gone")
    server.wait()


def test_the_engines_waiting_threads_sleep_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert child_environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert child_environment()["OMP_WAIT_POLICY"] == "ACTIVE"


def test_sigterm_ends_the_engine_cleanly_and_sigint_does_nothing(fleet: Fleet) -> None:
    member = fleet.add()
    pid = engine_pid(member)
    os.kill(pid, signal.SIGINT)
    assert answer(member, [40], 2) == [41, 42]
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: not is_running(pid), "the engine is gone")


def test_a_thread_that_comes_too_late_writes_into_no_file() -> None:
    """It has taken its request out, and the client is closed before it wakes the I/O thread."""
    client = engine_client.EngineClient(1)
    client.close()
    client._sinks[5] = Sink()
    client.cancel([5])
    assert client._bell.fd == -1


def test_closing_ends_open_requests(fleet: Fleet) -> None:
    member = fleet.add()
    _, sink = submit(member, [1], LONG)
    member.close()
    code, _ = sink.wait().error or (None, "")
    assert code == ErrorCode.UNAVAILABLE
