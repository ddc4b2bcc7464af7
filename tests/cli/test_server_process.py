"""Ports, addresses, processes and what the server streams: pytest tests/cli/test_server_process.py"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cb_backend.cli import main as cli_main
from cb_backend.cli import serve
from cb_backend.cli.demo_view import Stream
from cb_backend.cli.paths import CliError, load_client
from cb_backend.cli.server.addresses import http_status
from cb_backend.cli.server.local_server import ServerInstallation
from cb_backend.cli.server.processes import ProcessId, descendants
from cb_backend.cli.server.server_process import (
    ServerOptions,
    ServerProcess,
    check_ports,
    free_ports,
)
from tests.waiting import WAIT_S, eventually


def test_taken_port_is_named_with_its_flag() -> None:
    http, grpc, metrics = free_ports(3)
    assert len({http, grpc, metrics}) == 3
    options = ServerOptions(Path(), "127.0.0.1", http, grpc, metrics)
    check_ports(options)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", grpc))
        taken.listen()
        with pytest.raises(CliError, match=rf"port {grpc} of 127\.0\.0\.1 .*--grpc-port"):
            check_ports(options)
    for impossible in (-5, 0, 70000):
        with pytest.raises(CliError, match=f"port {impossible} cannot be used; --metrics-port must be between"):
            check_ports(ServerOptions(Path(), "127.0.0.1", http, grpc, impossible))
    with pytest.raises(CliError, match="ports must differ"):
        check_ports(ServerOptions(Path(), "127.0.0.1", http, http, metrics))


@pytest.mark.parametrize("port", [70000, 0, "http", "taken"])
def test_a_port_of_the_gateway_is_told_before_a_model_is_loaded(
    port: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_server", lambda: ServerInstallation(tmp_path, tmp_path, {}, "a stand-in"))
    monkeypatch.setattr(ServerProcess, "start", lambda self: pytest.fail("the server was started"))
    http, grpc, metrics, other = map(str, free_ports(4))
    (tmp_path / "config.json").write_text("{}")
    words = ["serve", str(tmp_path), "--http-port", http, "--grpc-port", grpc]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(other)))
        taken.listen()
        gateway = {"http": http, "taken": other}.get(str(port), str(port))
        assert cli_main.main([*words, "--metrics-port", metrics, "--openai-port", gateway]) == 1
    assert re.search(rf"^error: .*({gateway}.*--openai-port|--openai-port {gateway})", capsys.readouterr().err)


STAND_IN = """#!{python}
import http.server, sys, threading
ports = dict(word[2:].split("=", 1) for word in sys.argv[1:])

class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

def serve(port):
    threading.Thread(target=http.server.ThreadingHTTPServer(("127.0.0.1", int(ports[port])), Ok).serve_forever).start()

serve("http-port")
print("ready", flush=True)
open({gate!r}).read()  # until somebody opens the other end
serve("metrics-port")
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A pipe: who reads it waits until somebody opens it for writing."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def stand_in(gate: Path, *extra_arguments: str) -> ServerProcess:
    """A server that says over HTTP that it is ready, and opens the port of its metrics only when the gate opens."""
    binary = gate.with_name("server")
    binary.write_text(STAND_IN.format(python=sys.executable, gate=str(gate)))
    binary.chmod(0o755)
    options = ServerOptions(Path(), "127.0.0.1", *free_ports(3), extra_arguments=extra_arguments)
    return ServerProcess(ServerInstallation(binary, Path(), dict(os.environ), "a stand-in"), options)


def test_a_server_is_ready_when_its_metrics_answer_too(gate: Path) -> None:
    server = stand_in(gate)
    server.start()
    try:
        eventually(lambda: http_status(server.http_address, "/v2/health/ready") == 200, "it says that it is ready")
        assert not server.is_ready(), "whoever comes for the metrics now is refused"
        with pytest.raises(TimeoutError, match="not ready after 0 s"):
            server.wait_ready(0.1)
        gate.write_text("")
        server.wait_ready(WAIT_S)
        assert http_status(server.metrics_address, "/metrics") == 200
    finally:
        server.kill()


@pytest.mark.parametrize("off", [("--allow-metrics=false",), ("--allow-metrics=0",)])
def test_a_server_without_metrics_is_not_asked_for_them(gate: Path, off: tuple[str, ...]) -> None:
    server = stand_in(gate, *off)
    server.start()
    try:
        server.wait_ready(WAIT_S)
        assert http_status(server.metrics_address, "/metrics") is None
    finally:
        server.kill()


def test_addresses_are_those_that_the_server_is_told_last(gate: Path) -> None:
    server = stand_in(gate, "--http-port", "7", "--metrics-address=10.0.0.7")
    assert server.http_address == "127.0.0.1:7"
    assert server.metrics_address == f"10.0.0.7:{server.options.metrics_port}"
    with pytest.raises(CliError, match="leave --allow-http on"):
        stand_in(gate, "--allow-http=false").start()


def test_descendants_are_found_and_ended() -> None:
    script = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '3600'], start_new_session=True); time.sleep(3600)"
    )
    child = subprocess.Popen([sys.executable, "-c", script])
    try:
        eventually(lambda: len(descendants(child.pid)) == 1, "there is a grandchild")
        (grandchild,) = descendants(child.pid)
        assert grandchild.is_alive()
        # Its number with another start time is another process, and is left alone.
        other = ProcessId(grandchild.pid, grandchild.start_time + 1)
        other.kill()
        assert not other.is_alive()
        assert grandchild.is_alive()
        grandchild.kill()
        eventually(lambda: not grandchild.is_alive(), "it has ended")
    finally:
        child.kill()
        child.wait()
    assert descendants(child.pid) == []


def test_stream_figures() -> None:
    client = load_client()
    stream = Stream(1, "p", 8, started_at=10.0)
    for at, num_tokens in ((10.5, 1), (10.6, 1), (10.8, 2), (10.9, 0)):
        stream.add(client.Response("x", at, False, None, 7, num_tokens))
    assert stream.ttft_ms == pytest.approx(500)
    assert stream.inter_token_ms == pytest.approx([100, 200, 0])
    assert stream.num_output_tokens == 4
    assert stream.num_input_tokens == 7
    assert stream.tokens_per_s == pytest.approx(4 / 0.8)


def test_errors_are_one_line_and_the_exit_code_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["serve", "--model-repository", str(tmp_path / "nowhere")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: model repository")
    assert error.count("\n") == 1
    assert cli_main.main([]) == 2
    assert "demo" in capsys.readouterr().out
