"""Noticing that the server stops: against a small HTTP server that answers as the real one does."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cb_backend.serving import drain
from cb_backend.serving.drain import DrainWatch, ask_over_http, readiness_probe
from cb_backend.serving.server_arguments import exit_timeout_s
from tests.waiting import WAIT_S


class Health:
    """The HTTP port of a server with one model, whose readiness the test sets."""

    def __init__(self) -> None:
        self.status = 400
        self.state = "UNLOADING"  # in the index
        health = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(health.status if self.path == "/v2/models/llm/versions/1/ready" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_POST(self) -> None:
                index = [{"name": "other", "version": "1", "state": "READY"}]
                index.append({"name": "llm", "version": "1", "state": health.state})
                body = json.dumps(index).encode()
                self.send_response(200 if self.path == "/v2/repository/index" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def health(monkeypatch: pytest.MonkeyPatch) -> Iterator[Health]:
    monkeypatch.setattr(drain, "PROBE_TIMEOUT_S", WAIT_S)
    health = Health()
    yield health
    health.close()


def watch(health: Health, limit: str = "10") -> DrainWatch:
    arguments = {"http-port": str(health.port), "http-address": "127.0.0.1", "exit-timeout-secs": limit}
    return DrainWatch(readiness_probe(arguments, "llm", "1"), exit_timeout_s(arguments))


def test_not_ready_before_the_first_ready_is_starting(health: Health) -> None:
    drain = watch(health)
    for _ in range(5):
        drain.check()
    assert not drain.is_draining


def test_unload_is_noticed_and_stays_noticed(health: Health) -> None:
    drain = watch(health)
    health.status = 200
    drain.check()
    health.status = 400
    drain.check()
    assert not drain.is_draining, "one sign may be a hiccup"
    drain.check()
    assert drain.is_draining
    health.status = 200  # the model was loaded anew, in other processes
    drain.check()
    assert drain.is_draining


def test_a_loaded_model_without_its_engine_is_not_stopping(health: Health) -> None:
    """Newer servers ask the model's `is_ready`: while an engine is started again they answer so."""
    drain = watch(health)
    health.status, health.state = 200, "READY"
    drain.check()
    health.status = 503
    for _ in range(5):
        drain.check()
    assert not drain.is_draining
    health.state = "UNLOADING"
    drain.check()
    drain.check()
    assert drain.is_draining


def test_a_closed_listener_is_a_stopping_server(health: Health) -> None:
    drain = watch(health)
    health.status = 200
    drain.check()
    health.close()
    drain.check()
    drain.check()
    assert drain.is_draining


def test_a_listener_that_resets_whoever_comes_is_a_stopping_server() -> None:
    """So does the server's while it waits for the HTTP streams that are open: it takes no new connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reset_all() -> None:
            with contextlib.suppress(OSError):  # of the listener's end
                while True:
                    connection, _ = listener.accept()
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.close()

        threading.Thread(target=reset_all, daemon=True).start()
        port = listener.getsockname()[1]
        assert [ask_over_http("127.0.0.1", port, "llm", "1") for _ in range(5)] == [False] * 5


def test_unclear_answers_say_nothing(health: Health) -> None:
    drain = watch(health)
    health.status = 200
    drain.check()
    health.status = 403  # the health API is restricted on this port
    for _ in range(5):
        drain.check()
    assert not drain.is_draining


def test_time_is_up_before_the_servers_limit(health: Health, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("cb_backend.serving.drain.time.monotonic", lambda: now)
    drain = DrainWatch(lambda: now < 1001, exit_timeout_s=10.0)
    drain.check()
    now = 1001.0
    drain.check()
    now = 1001.25
    drain.check()
    assert drain.is_draining
    now = 1007.4
    assert not drain.is_time_up
    now = 1007.5  # first sign + 10 s - 3.5 s
    assert drain.is_time_up


@pytest.mark.parametrize(("num_front_ends", "limit", "drain_s"), [(1, 30, 26.5), (8, 30, 18), (8, 60, 46), (1, 5, 3)])
def test_many_front_ends_need_more_time_to_end(
    num_front_ends: int, limit: float, drain_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([True, False, False])
    now = 0.0
    monkeypatch.setattr("cb_backend.serving.drain.time.monotonic", lambda: now)
    drain = DrainWatch(lambda: next(answers), limit, num_front_ends)
    for _ in range(3):
        drain.check()
    now = drain_s - 0.01
    assert not drain.is_time_up
    now = drain_s
    assert drain.is_time_up


def test_what_can_be_asked() -> None:
    assert readiness_probe({"allow-http": "0", "allow-grpc": "false"}, "llm", "1") is None
    assert readiness_probe({"allow-http": "0", "grpc-use-ssl": "true"}, "llm", "1") is None
    assert readiness_probe({"allow-http": "false"}, "llm", "1") is not None


def test_over_grpc_nobody_listening_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "PROBE_TIMEOUT_S", WAIT_S)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, so that nobody else takes it, and not listening
        arguments = {"allow-http": "false", "grpc-port": str(unused.getsockname()[1])}
        probe = readiness_probe(arguments, "llm", "1")
        assert probe is not None
        assert probe() is False


def test_nobody_listening_is_a_refusal_and_a_server_that_does_not_answer_is_unclear(
    health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = health.port
    assert ask_over_http("127.0.0.1", port, "llm", "1") is False
    health.close()
    assert ask_over_http("127.0.0.1", port, "llm", "1") is False
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        monkeypatch.setattr(drain, "PROBE_TIMEOUT_S", 0.1)
        assert ask_over_http("127.0.0.1", mute.getsockname()[1], "llm", "1") is None
