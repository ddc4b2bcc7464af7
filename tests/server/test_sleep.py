"""A model that sleeps behind a real server: by itself, told to, killed meanwhile.

pytest tests/server/test_sleep.py
"""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cb_backend.cli.main import main
from cb_backend.cli.server.addresses import http_status
from cb_backend.cli.timelines.steps import from_dump
from cb_backend.cli.timelines.svg import draw
from cb_backend.front_end.engines.engine_observer import ask_for_steps, running_engines
from tests.server.conftest import RunningServer, running_server
from tests.server.dying_sleeper import ENVIRONMENT
from tests.server.raw_stream import RawStream
from tests.server.sleeping_server import GREEDY, PROMPTS, answer, answer_when_served, command, is_asleep, server
from tests.server.tiny_checkpoint import Reference
from tests.waiting import eventually

__all__ = ["server"]  # a fixture

pytestmark = pytest.mark.server


def test_the_first_request_wakes_the_model_and_gets_the_same_answer(
    server: RunningServer, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = [reference.greedy_text(prompt, GREEDY["max_tokens"]) for prompt in PROMPTS]
    (engine,) = server.engine_pids()
    for _ in range(3):
        assert command(server, "sleep", "llm") == 0
        eventually(lambda: is_asleep(server), "the metrics say asleep")
        assert server.gauge("cb_model_memory_bytes", "llm") == 0.0
        assert http_status(server.process.http_address, "/v2/models/llm/ready") == 200, "it serves whoever comes"
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(lambda prompt: answer(server, prompt), PROMPTS)) == expected
        eventually(lambda: not is_asleep(server), "the metrics say awake")
    assert server.engine_pids() == [engine]
    assert server.gauge("cb_wakes_total", "llm") == 3.0
    assert "is asleep" in capsys.readouterr().out
    server.wait_idle()


def test_streams_go_on_to_their_ends_before_the_model_sleeps(server: RunningServer, reference: Reference) -> None:
    long = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
    streams = [RawStream(server.url, f"stream {i}", long) for i in range(4)]
    for stream in streams:
        stream.wait(num_texts=1)
    assert command(server, "sleep", "llm") == 0
    for stream in streams:
        stream.wait().close()
        assert (stream.errors, stream.num_finals) == ([], 1)
    assert answer(server, "fox") == reference.greedy_text("fox", GREEDY["max_tokens"])


def test_an_order_that_ctrl_c_ends_is_not_carried_out_later(
    server: RunningServer, checkpoint: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    """While a request runs that it would have to wait for."""
    (life,) = (life for life in running_engines() if life.pid in server.engine_pids())

    def is_due() -> bool:
        rest = ask_for_steps(life.socket_path, 1).rest
        return rest is not None and rest.update != ""

    def interrupt() -> None:
        eventually(is_due, "it waits for the stream")
        os.kill(os.getpid(), signal.SIGINT)

    stream = RawStream(server.url, "fox", {"max_tokens": 900, "temperature": 0, "ignore_eos": True})
    stream.wait(num_texts=1)
    with ThreadPoolExecutor(1) as pool:
        interrupted = pool.submit(interrupt)
        exit_code = command(server, "update", "llm", str(checkpoint))
    interrupted.result()
    assert exit_code == 130
    assert capsys.readouterr().err == (
        f"engine {life.pid} is not updated: it was called off before it began; cb-backend status shows what it does\n"
    )
    assert not is_due()
    stream.wait().close()
    assert (stream.errors, stream.num_finals) == ([], 1)
    assert answer(server, "fox") == reference.greedy_text("fox", GREEDY["max_tokens"])
    assert server.gauge("cb_weight_updates_total", "llm") == 0.0


def test_wake_brings_a_model_back_before_a_request_does(server: RunningServer) -> None:
    assert command(server, "sleep", "llm") == 0
    eventually(lambda: is_asleep(server), "asleep")
    assert command(server, "wake", "llm") == 0
    assert command(server, "wake", "llm") == 0, "as it is already"
    eventually(lambda: not is_asleep(server), "awake")


def test_status_and_timeline_say_that_a_model_was_asleep(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(server, "fox")
    assert command(server, "sleep", "llm") == 0
    eventually(lambda: is_asleep(server), "asleep")
    capsys.readouterr()
    address, metrics = server.process.http_address, server.process.metrics_address
    assert main(["status", "--url", address, "--metrics-url", metrics, "--interval", "0.1"]) == 0
    assert "ready, asleep" in capsys.readouterr().out
    time.sleep(0.5)
    answer(server, "fox")
    (life,) = (life for life in running_engines() if life.pid in server.engine_pids())
    log = from_dump(ask_for_steps(life.socket_path, 100))
    slept = [step.asleep_seconds for step in log.steps]
    assert max(slept) >= 0.5
    assert "asleep for" in draw(log)


def test_a_client_has_the_model_sleep_and_wake_by_a_request_parameter(server: RunningServer) -> None:
    def ask(**fields: object) -> tuple[int, str]:
        status, text = server.post("/v2/models/llm/generate", {"text_input": "", **fields})
        answered = json.loads(text)
        return status, answered["text_output"] if status == 200 else answered["error"]

    assert ask(rest="sleep") == (200, "asleep")
    eventually(lambda: ask(rest="state") == (200, "asleep"), "the front ends know")
    assert ask(rest="wake") == (200, "awake")
    for fields, reason in (
        ({"rest": "doze"}, "'doze'; use one of sleep, wake, state"),
        ({"rest": 1}, "use one of"),
        ({"rest": "sleep", "text_input": "fox"}, "empty 'text_input'"),
    ):
        status, error = ask(**fields)
        assert (status, reason in error) == (400, True), error


def test_an_engine_that_is_killed_asleep_is_replaced_and_serves(server: RunningServer, reference: Reference) -> None:
    assert command(server, "sleep", "llm") == 0
    (engine,) = server.engine_pids()
    os.kill(engine, signal.SIGKILL)
    assert answer_when_served(server, "fox") == reference.greedy_text("fox", GREEDY["max_tokens"])
    assert server.engine_pids() != [engine]


def test_an_engine_that_dies_or_fails_while_it_falls_asleep_or_wakes_is_replaced(
    checkpoint: Path, tmp_path: Path, reference: Reference
) -> None:
    fault = tmp_path / "fault"
    options = {"worker_cls": "tests.server.dying_sleeper:create_runner", "idle_sleep_s": 0, "front_ends": 1}
    with running_server(checkpoint, tmp_path / "server", environment={ENVIRONMENT: str(fault)}, **options) as server:
        for when, how in (("wake", "kill"), ("wake", "raise"), ("sleep", "kill"), ("sleep", "raise")):
            (engine,) = server.engine_pids()
            if when == "wake":
                assert command(server, "sleep", "llm") == 0
                fault.write_text(f"{when} {how}")
                stream = RawStream(server.url, "fox", GREEDY).wait()
                stream.close()
                assert (len(stream.errors), stream.num_finals) == (1, 1), "who woke it hears of it"
            else:
                fault.write_text(f"{when} {how}")
                assert command(server, "sleep", "llm", "--timeout", "3") == 1
            assert answer_when_served(server, "fox") == reference.greedy_text("fox", GREEDY["max_tokens"]), (when, how)
            assert server.engine_pids() != [engine]
            assert not fault.exists()


def test_a_model_without_requests_falls_asleep_by_itself(
    checkpoint: Path, tmp_path: Path, reference: Reference
) -> None:
    with running_server(checkpoint, tmp_path, front_ends=1, idle_sleep_s=0.3, sleep_weights="host") as server:
        for _ in range(2):
            eventually(lambda: is_asleep(server), "it has nothing to do")
            assert answer(server, "fox") == reference.greedy_text("fox", GREEDY["max_tokens"])


def test_a_model_that_cannot_sleep_says_what_to_set(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_server(checkpoint, tmp_path, front_ends=1) as server:
        assert command(server, "sleep", "llm") == 1
        assert "set idle_sleep_s in its model.json" in capsys.readouterr().err
        status, text = server.post("/v2/models/llm/generate", {"text_input": "", "rest": "sleep"})
        assert (status, "needs idle_sleep_s" in text) == (400, True)
        assert server.gauge("cb_engines_asleep", "llm") is None
