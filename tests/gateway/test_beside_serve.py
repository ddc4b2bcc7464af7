"""`cb-backend serve` starts the gateway beside its server and ends it with it."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from cb_backend.cli import main as cli_main
from cb_backend.cli import serve
from cb_backend.cli.main import main
from cb_backend.cli.paths import CliError
from cb_backend.cli.server.gateway_options import gateway_settings, gateway_words, open_note
from cb_backend.cli.server.gateway_process import gateway_beside
from cb_backend.cli.server.server_process import free_ports
from tests.gateway.test_disconnects import gateway_pid
from tests.server.tiny_checkpoint import write_tiny_checkpoint
from tests.waiting import WAIT_S, eventually


@pytest.mark.server
def test_serve_has_an_openai_address_that_ends_with_it(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    http, grpc, metrics, port = free_ports(4)
    ports = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics, "--openai-port", port]
    words = ["serve", str(checkpoint), "--kv-cache-memory-bytes", str(32 << 20), *map(str, ports)]
    process = subprocess.Popen(
        [sys.executable, "-m", "cb_backend.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        _wait_listening(process, port)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            answer = client.completions.create(model="llm", prompt="the quick brown fox", max_tokens=4, temperature=0)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    assert f"OpenAI  http://127.0.0.1:{port}/v1" in output
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)


def _wait_listening(process: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + 2 * WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    process.kill()
    pytest.fail(f"no gateway: {process.communicate()[0]}")


def test_a_port_that_was_asked_for_and_is_taken_is_an_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(CliError, match=f"port {port} of --openai-port is in use"),
            gateway_beside("127.0.0.1", port, "127.0.0.1:9"),
        ):
            pass


def test_serve_hands_on_the_gateways_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's names of parsers as well; a wrong value is told before a server starts."""
    (keys := tmp_path / "keys").write_text("one\n")
    given = ["--tool-call-parser", "llm=mistral", "--reasoning-parser", "none", "--tool-parser", "hermes"]
    given += ["--api-key-file", str(keys), "--max-body-mib", "8", "--workers", "2", "--lora-separator", ""]
    given += ["--allow-origin", "http://a", "--allow-origin=-b"]
    args = parsed("serve", *given)
    words = gateway_words(args)
    assert words == [
        f"--api-key-file={keys}", "--max-body-mib=8", "--workers=2", "--lora-separator=", "--allow-origin=http://a",
        "--allow-origin=-b", "--tool-parser=llm=mistral", "--tool-parser=hermes", "--reasoning-parser=none",
    ]  # fmt: skip
    assert gateway_words(parsed("openai", *words)) == words
    settings = gateway_settings(parsed("openai", *words), "here:1")
    assert (settings.api_key_file, settings.max_body_bytes, settings.lora_separator) == (str(keys), 8 << 20, "")
    assert gateway_words(parsed("serve")) == []
    for option, text in (
        (["--reasoning-parser", "deepseek_r1"], "'deepseek_r1' is none of auto, think"),
        (["--max-body-mib", "0"], "--workers and --max-body-mib must be 1 or more"),
        (["--api-key-file", "/nowhere/keys"], "the API keys' file /nowhere/keys cannot be read"),
        (["--no-openai", "--workers", "2"], "--workers is for the OpenAI gateway, which --no-openai leaves out"),
    ):
        assert main(["serve", *option]) == 1
        assert text in capsys.readouterr().err


def test_serve_has_every_option_of_the_gateway() -> None:
    own = {"url", "host", "port", "beside_server", "model_repository", "run", "command_parser", "handed_on"}
    assert vars(parsed("openai")).keys() - own <= vars(parsed("serve")).keys()


def parsed(*words: str) -> argparse.Namespace:
    return cli_main._parse(words[0], list(words))


@pytest.mark.parametrize(("host", "words", "shown"), [
    ("0.0.0.0", [], "0.0.0.0:9"), ("::", [], "[::]:9"), ("[::]", [], "[::]:9"), ("127.0.0.1", [], None),
    ("127.0.0.2", [], None), ("localhost", [], None), ("0.0.0.0", ["--api-key-file", "keys"], None),
])  # fmt: skip
def test_who_opens_the_gateway_to_all_is_told(host: str, words: list[str], shown: str | None) -> None:
    told = f"NOTE: everybody who reaches {shown} may use it; --api-key-file asks for a key" if shown else ""
    assert open_note(parsed("serve", *words), host, 9) == told


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_key_of_the_gateways_does_not_hide_that_the_servers_ports_ask_for_none(host: str, shown: bool) -> None:
    told = open_note(parsed("serve", "--api-key-file", "keys"), host, 9, is_beside_server=True)
    assert ("server's own ports" in told) == shown


def test_serve_says_where_its_gateway_is_open() -> None:
    server: Any = types.SimpleNamespace(
        http_address="0.0.0.0:8000", grpc_address="0.0.0.0:8001", metrics_address="0.0.0.0:8002", has_metrics=True
    )
    note = "NOTE: everybody who reaches 0.0.0.0:9 may use it; --api-key-file asks for a key"
    assert note in serve._ready_text(server, ["llm"], "0.0.0.0:9", parsed("serve")).splitlines()
    with_key = serve._ready_text(server, ["llm"], "0.0.0.0:9", parsed("serve", "--api-key-file", "keys"))
    assert "may use it" not in with_key
    assert "NOTE: the server's own ports (HTTP, gRPC) are open too and ask for no key" in with_key
    assert "NOTE" not in serve._ready_text(server, ["llm"], None, parsed("serve"))


def test_a_default_port_that_is_taken_leaves_the_gateway_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr("cb_backend.cli.server.gateway_process.DEFAULT_PORT", other.getsockname()[1])
        with gateway_beside("127.0.0.1", None, "127.0.0.1:9") as address:
            assert address is None


def test_a_gateway_ends_with_the_process_that_started_it() -> None:
    (port,) = free_ports(1)
    starter = (
        "import time\n"
        "from cb_backend.cli.server.gateway_process import gateway_beside\n"
        f"with gateway_beside('127.0.0.1', {port}, '127.0.0.1:9') as address:\n"
        "    print(address, flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == f"127.0.0.1:{port}"
    process.kill()
    process.communicate()
    eventually(lambda: _refuses(port), "nobody listens any more")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_gateway_that_dies_is_started_again(num_workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Killed twice, by hand or for its memory: clients find it at the same address, and its end is told.

    Its workers, whom nobody else would end, must not keep the port.
    """
    (port,) = free_ports(1)
    with gateway_beside("127.0.0.1", port, "127.0.0.1:9", [f"--workers={num_workers}"]):
        for _ in range(2):
            pid = gateway_pid(port)
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: _refuses(port), "nobody listens")
            eventually(lambda: not _refuses(port), "the gateway listens again")
            assert gateway_pid(port) != pid
    assert capfd.readouterr().out.count("the OpenAI gateway ended with exit code -9; starting it again") == 2
    assert _refuses(port)


def test_a_gateway_is_not_started_again_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    with gateway_beside("127.0.0.1", port, "127.0.0.1:9"):
        os.kill(gateway_pid(port), signal.SIGKILL)
    assert _refuses(port)


def _refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize(("words", "text"), [
    (["--workers", "0"], "--workers and --max-body-mib must be 1 or more"),
    (["--tool-parser", "xml"], "'xml' is none of auto, hermes"),
    (["--api-key-file", "/nowhere/keys"], "the API keys' file /nowhere/keys cannot be read"),
    (["--port", "70000"], "port 70000 cannot be used; --port must be between 1 and 65535"),
    (["--port", "-1"], "port -1 cannot be used; --port must be between 1 and 65535"),
    (["--host", "no.such.invalid"], "--host 'no.such.invalid' is no address of this machine"),
    (["--host", "192.0.2.1"], "--host '192.0.2.1' is no address of this machine"),
    (["--model-repository", "/nowhere"], "--model-repository /nowhere is no folder"),
])  # fmt: skip
def test_a_wrong_option_is_told_before_anything_listens(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["openai", *words]) == 1
    assert text in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_with_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert main(["openai", "--port", str(port)]) == 1
    told = capsys.readouterr()
    assert f"error: port {port} of 127.0.0.1 cannot be used (Address already in use); choose another" in told.err
    assert told.out == "", "it does not say that it serves"
