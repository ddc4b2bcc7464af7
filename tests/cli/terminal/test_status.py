"""`cb-backend status`: what a server's metrics and an engine's steps say, and what is shown of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cb_backend.cli import status as command
from cb_backend.cli.main import main
from cb_backend.cli.paths import CliError
from cb_backend.cli.terminal import local_state
from cb_backend.cli.terminal.local_state import LocalServer, state_of
from cb_backend.cli.terminal.server_state import ask_server, read_samples, with_rates
from cb_backend.contracts.step_dump import StepDump
from cb_backend.front_end.engines.runtime_dir import EngineLife
from tests.waiting import eventually

METRICS = """# HELP cb_requests_running Requests in the batch
# TYPE cb_requests_running gauge
cb_requests_running{model="llm",version="1"} 3
cb_requests_waiting{model="llm",version="1"} 2
nv_trt_llm_request_metrics{model="llm",request_type="max",version="1"} 64
nv_trt_llm_request_metrics{model="llm",request_type="active",version="1"} 5
cb_kv_cache_usage{model="llm",version="1"} 0.125
cb_output_tokens_total{model="llm",version="1"} %d
cb_odd{text="a \\"quoted\\" } word"} 7
broken line
"""
INDEX = [
    {"name": "llm", "version": "1", "state": "READY"},
    {"name": "llm", "version": "2", "state": "UNAVAILABLE", "reason": "unloaded"},
    {"name": "chat", "version": "1", "state": "READY"},
    {"name": "bad", "version": "1", "state": "UNAVAILABLE", "reason": "Internal: no memory"},
]


class Stand:
    """A server over HTTP that generates 100 tokens between two looks at its metrics."""

    def __init__(self) -> None:
        self.num_tokens, self.is_ready, self.index_key = 0, True, ""
        stand = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers: dict[str, Any] = {"/v2": {"name": "triton", "version": "2.51.0"}, "/v2/health/ready": {}}
                if self.path == "/metrics":
                    stand.num_tokens += 100
                    return self._send(200, (METRICS % stand.num_tokens).encode())
                status = 400 if self.path == "/v2/health/ready" and not stand.is_ready else 200
                return self._send(status, json.dumps(answers[self.path]).encode())

            def do_POST(self) -> None:
                assert self.path == "/v2/repository/index"
                is_allowed = not stand.index_key or self.headers.get("key") == stand.index_key
                self._send(200 if is_allowed else 403, json.dumps(INDEX).encode())

            def _send(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.http.server_port}"


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    thread = threading.Thread(target=made.http.serve_forever, daemon=True)
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


def dump(now: float, *, is_last_open: bool = False) -> StepDump:
    """Four steps, of which the last two are recent: a prompt of 10 tokens beside a row, then two rows."""
    rows, decodes, scheduled = [1, 1, 2, 2], [0, 1, 1, 2], [5, 1, 1, 10, 1, 1]
    ends = [now - 59, now - 50, now - 2, 0.0 if is_last_open else now - 0.5]
    return StepDump(
        num_slots=8, num_blocks=40, block_size=16, step_ids=np.arange(4, dtype="<i8").tobytes(),
        begins=np.array([now - 60, now - 51, now - 3, now - 1], "<f8").tobytes(), ends=np.array(ends, "<f8").tobytes(),
        num_rows=np.array(rows, "<i4").tobytes(), num_decode_rows=np.array(decodes, "<i4").tobytes(),
        num_waiting=np.zeros(4, "<i4").tobytes(), num_free_blocks=np.array([39, 38, 35, 30], "<i4").tobytes(),
        num_preemptions=np.zeros(4, "<i8").tobytes(), slots=np.zeros(6, "<i4").tobytes(),
        num_scheduled_tokens=np.array(scheduled, "<i4").tobytes(), request_ids=np.zeros(6, "<i8").tobytes(),
        joined=[], ended=[],
    )  # fmt: skip


def test_h16_status_an_engines_last_seconds() -> None:
    now = 1000.0
    for state in (state_of(dump(now), now), state_of(dump(now, is_last_open=True), now)):
        assert (state.running, state.num_slots, state.kv_usage) == (2, 8, 0.25)
        assert state.output_tokens_per_s == pytest.approx(3 / local_state.WINDOW_S)
        assert state.prompt_tokens_per_s == pytest.approx(10 / local_state.WINDOW_S)
        assert state.steps_per_s == pytest.approx(2 / local_state.WINDOW_S)


def test_h16_status_an_engine_that_rests() -> None:
    late = state_of(dump(1000.0), 1060.0)
    assert (late.running, late.kv_usage, late.output_tokens_per_s) == (0, 0.0, 0.0)
    fresh = StepDump(**{name: b"" if isinstance(value, bytes) else value for name, value in _fields(dump(0.0)).items()})
    assert state_of(fresh, 5.0).num_slots == 8


def _fields(value: StepDump) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


def test_metrics_as_samples() -> None:
    samples = {sample.name: sample for sample in read_samples(METRICS % 7)}
    assert samples["cb_odd"].labels == {"text": 'a \\"quoted\\" } word'}
    assert samples["cb_output_tokens_total"].value == 7
    assert len(read_samples(METRICS % 7)) == 7


def test_h16_status_of_a_server(stand: Stand) -> None:
    first = ask_server(stand.address, stand.address)
    state = with_rates(first, ask_server(stand.address, stand.address), 2.0)
    assert (state.version, state.is_ready) == ("2.51.0", True)
    assert list(state.models) == ["bad", "chat", "llm"]
    llm, chat, bad = state.models["llm"], state.models["chat"], state.models["bad"]
    assert (llm.state, llm.running, llm.waiting, llm.num_slots, llm.kv_usage) == ("ready", 3, 2, 64, 0.125)
    assert llm.tokens_per_s == 50.0
    assert (chat.state, chat.running, chat.tokens_per_s) == ("ready", None, None)
    assert bad.state == "unavailable: Internal: no memory"


def test_h16_status_on_the_terminal(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["status", "--url", stand.address, "--metrics-url", stand.address, "--interval", "0.05"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "server  2.51.0  ready"
    row = next(line.split() for line in lines if line.startswith("llm"))
    assert row[:7] == ["llm", "ready", "3", "2", "64", "12.5%", row[6]]
    assert float(row[6].replace(",", "")) > 0
    stand.is_ready = False
    assert main([*words, "--json"]) == 1
    (server,) = json.loads(capsys.readouterr().out)
    assert server["state"]["is_ready"] is False
    assert server["state"]["models"]["llm"]["num_slots"] == 64


@pytest.mark.parametrize("is_ours", [False, True])
def test_metrics_that_do_not_answer_are_not_shown(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_ours: bool
) -> None:
    """A server that is named by its HTTP address may have them anywhere, or not at all."""
    words = ["status", "--interval", "0.05"]
    if is_ours:
        server = LocalServer(10, stand.address, None, "127.0.0.1:1", {}, ())
        monkeypatch.setattr(command, "local_servers", lambda: [server])
    else:
        words += ["--url", stand.address, "--metrics-url", "127.0.0.1:1"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "metrics 127.0.0.1:1" not in said
    assert "no metrics answer at 127.0.0.1:1, so figures are missing" in said
    assert ("--metrics-url HOST:PORT" in said) == (not is_ours)
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"]["has_metrics"] is False
    if not is_ours:
        assert main([*words, "--metrics-url", stand.address]) == 0
        said = capsys.readouterr().out
        assert f"metrics {stand.address}" in said
        assert "figures are missing" not in said


def test_h16_status_where_nothing_runs(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "local_servers", lambda: [])
    assert main(["status"]) == 1
    assert "start one: cb-backend serve" in capsys.readouterr().err
    assert main(["status", "--url", "127.0.0.1:1"]) == 1
    assert "no server answers at 127.0.0.1:1" in capsys.readouterr().err
    assert main(["status", "--metrics-url", stand.address]) == 1
    assert "--url" in capsys.readouterr().err


def test_h16_status_one_that_hangs_does_not_hide_the_others(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    life = EngineLife(1, 1, "/nowhere/9-9-a/x.sock")
    servers = [
        LocalServer(9, "127.0.0.1:1", None, None, {}, (life,)),
        LocalServer(10, stand.address, None, stand.address, {}, ()),
    ]
    monkeypatch.setattr(command, "local_servers", lambda: servers)
    monkeypatch.setattr(local_state, "ANSWER_S", 0.05)
    assert main(["status", "--interval", "0.05"]) == 1
    said = capsys.readouterr().out
    assert "server 9  NOT READY" in said
    assert "it starts, or it hangs" in said
    assert "has not answered for 0.05 s" in said
    assert "server 10  2.51.0  ready" in said


@pytest.mark.parametrize(("answer", "text"), [
    (b"\0\0\x12\x04\0\0\0\0\0\0\x03\x7f\xff\xff\xff\0\x04\0\x01\0\0\0\x05\0\0\x40\0", "does not speak HTTP"),
    (b"HTTP/1.0 200 OK\r\ncontent-length: 6\r\n\r\n<html>", "/v2 does not answer as a Triton server does"),
    (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n[]", "/v2 does not answer as a Triton server does"),
])  # fmt: skip
def test_h16_status_of_a_port_that_is_something_else(
    answer: bytes, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """gRPC's, as `chat --url` has it, or another program's."""

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        assert main(["status", "--url", f"127.0.0.1:{listening.getsockname()[1]}"]) == 1
        thread.join()
    said = capsys.readouterr().err
    assert text in said
    assert "HTTP port" in said


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_h16_status_watches_through_a_restart(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    servers = [LocalServer(10, stand.address, None, stand.address, {}, ())]
    looks = iter([servers, [], servers])

    def look() -> list[LocalServer]:
        found = next(looks, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(command, "local_servers", look)
    assert main(["status", "--watch", "--interval", "0.05", *options]) == 130
    said = capsys.readouterr()
    assert said.out.count("2.51.0") == 2
    assert "no engine of yours is running here" in said.err


def test_an_index_for_those_who_know_a_key(stand: Stand) -> None:
    stand.index_key = "secret"
    with pytest.raises(CliError, match="answers 403"):
        ask_server(stand.address, None)
    assert "llm" in ask_server(stand.address, None, {"key": "secret"}).models


@pytest.mark.parametrize("how", [["-m", "cb_backend.cli.main"], ["bin/cb-backend"]])
def test_h16_gateways_are_found_however_they_were_started(how: list[str], tmp_path: Path) -> None:
    for name in ("cb_backend/__init__.py", "cb_backend/cli/__init__.py", "cb_backend/cli/main.py", "bin/cb-backend"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import time\ntime.sleep(3600)\n" if name.endswith(("main.py", "d")) else "")
    command = [sys.executable, *how, "openai", "--url", "127.0.0.1:7", "--port=9123"]
    process = subprocess.Popen(command, cwd=tmp_path)
    try:
        eventually(lambda: local_state.gateways("localhost:7") == ["127.0.0.1:9123"], "it is found")
    finally:
        process.kill()
        process.wait()
