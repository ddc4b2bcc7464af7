"""`cb-backend status` and `chat` against a real server, and a chat that starts one for itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cb_backend.cli.main import main
from cb_backend.cli.terminal import local_state
from cb_backend.front_end.engines.engine_observer import running_engines
from tests.gateway.conftest import running_gateway
from tests.server.conftest import RunningServer
from tests.server.tiny_checkpoint import EOS, MAX_MODEL_LEN, Reference, write_tiny_checkpoint
from tests.waiting import WAIT_S

pytestmark = pytest.mark.server


def test_h16_status_of_a_real_server(gateway_server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    process = gateway_server.process
    gateway_server.client.generate("the quick brown fox", max_tokens=8, temperature=0)
    with running_gateway(gateway_server.url) as address:
        assert main(["status", "--json", "--interval", "0.2"]) in (0, 1)  # there may be other servers here
        servers = json.loads(capsys.readouterr().out)
        (own,) = (server for server in servers if server["pid"] == process.pid)
        assert (own["http"], own["grpc"], own["metrics"]) == (
            process.http_address, process.grpc_address, process.metrics_address,
        )  # fmt: skip
        assert address.removeprefix("http://") in own["openai"]  # beside those of other tests
    assert own["state"]["is_ready"]
    assert own["state"]["models"]["llm"]["num_slots"] == 16
    assert own["state"]["models"]["llm"]["num_tokens"] >= 8
    (engine,) = own["engines"]
    assert engine["pid"] in gateway_server.engine_pids()
    assert (engine["num_slots"], engine["problem"]) == (16, "")
    assert main(["status", "--url", process.http_address, "--metrics-url", process.metrics_address]) == 0
    assert re.match(r"server  2\.\d+\.\d+  ready\n", capsys.readouterr().out)


def test_h16_status_shows_what_runs(gateway_server: RunningServer) -> None:
    stream = gateway_server.client.stream("the quick brown fox", max_tokens=3000, ignore_eos=True, temperature=0)
    for _ in range(20):
        next(stream)
    (life,) = (life for life in running_engines() if life.pid in gateway_server.engine_pids())
    state = local_state.engine_state(life)
    assert (state.running, state.problem) == (1, "")
    assert state.output_tokens_per_s > 0
    assert state.kv_usage > 0
    stream.close()
    gateway_server.wait_idle()


def test_h16_chat_with_a_real_server(
    gateway_server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["chat", "--url", gateway_server.url, "-q", "fox", "--system", "queen"]
    assert main([*words, "--max-tokens", "12", "--temperature", "0"]) == 0
    prompt = f"system: queen{EOS}user: fox{EOS}assistant:"
    reference = Reference(write_tiny_checkpoint(tmp_path))
    assert capsys.readouterr().out == reference.greedy_text(prompt, 12) + "\n"
    assert main([*words, "--max-tokens", str(MAX_MODEL_LEN), "--temperature", "999"]) == 1
    assert "temperature" in capsys.readouterr().err


@pytest.mark.slow
def test_h16_chat_starts_a_server_of_its_own_and_ends_it(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    program = (
        "import sys\n"
        "from cb_backend.cli import chat, main\n"
        "chat.DEFAULT_URL = '127.0.0.1:1'\n"  # whatever runs on this machine
        "sys.exit(main.main(sys.argv[1:]))\n"
    )
    words = ["chat", str(checkpoint), "-q", "fox", "--max-tokens", "12", "--temperature", "0"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=3 * WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == Reference(checkpoint).greedy_text(f"user: fox{EOS}assistant:", 12) + "\n"
    assert str(checkpoint) not in subprocess.run(["ps", "-ef"], capture_output=True, text=True, check=True).stdout
