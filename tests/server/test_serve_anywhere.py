"""`cb-backend serve` from odd places and behind a restricted door: pytest tests/server/test_serve_anywhere.py

One server has all of it at once: a model repository whose path a shell and ASCII cannot hold, a checkpoint outside
ASCII, an IPv6 address, and interfaces that are kept to those who know a key.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cb_backend.cli.paths import checkout_path, load_client
from cb_backend.cli.server.addresses import http_status
from cb_backend.cli.server.server_process import free_ports
from tests.server.conftest import running_server
from tests.server.raw_stream import RawStream
from tests.server.tiny_checkpoint import Reference
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.server

KEYS = {"Key": "a=b"}
RESTRICTIONS = (
    "--http-restricted-api=health,model-repository:Key=a=b",
    "--grpc-restricted-protocol=health,model-repository:key=c",
)


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@dataclass
class Served:
    process: subprocess.Popen[bytes]
    log: Path
    host: str
    http_port: int
    grpc_url: str

    def says(self, text: str) -> bool:
        assert self.process.poll() is None or text in self.log.read_text(), self.log.read_text()
        return text in self.log.read_text()


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    repository = folder / "my models (größe)"
    for name in ("llm", "tokens"):
        shutil.copytree(checkout_path(f"model_repository/{name}"), repository / name)
    model = shutil.copytree(checkpoint, folder / "größe 東京")
    arguments = {"model": str(model), "max_num_seqs": 16, "kv_cache_memory_bytes": 32 << 20}
    (repository / "llm" / "1" / "model.json").write_text(json.dumps(arguments, ensure_ascii=False), encoding="utf-8")
    http, grpc, metrics = free_ports(3)
    host = "::1" if has_ipv6() else "127.0.0.1"
    command = [sys.executable, "-m", "cb_backend.cli.main", "serve", "--model-repository", str(repository)]
    command += ["--host", host, "--port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    log = folder / "serve.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--exit-timeout-secs", "120", "--", *RESTRICTIONS], env=environment, stdout=file, stderr=file
        )
    shown = f"[{host}]" if ":" in host else host
    try:
        served = Served(process, log, shown, http, f"{shown}:{grpc}")
        eventually(lambda: served.says("ready after") or served.says("waiting"), "the engine is on its way")
        eventually(lambda: served.says("ready: llm, tokens"), "serve says that it is ready")
        yield served
    finally:
        print(log.read_text())  # shown by pytest where a test fails
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WAIT_S)
        process.kill()


def test_r63a_a_checkpoint_outside_ascii(served: Served, reference: Reference) -> None:
    client = load_client().Client(served.grpc_url, "llm", timeout=WAIT_S)
    assert client.generate("the quick", max_tokens=12, temperature=0) == reference.greedy_text("the quick", 12)
    assert client.chat("größe", max_tokens=4, temperature=0), "its chat template is found"


def test_r63a_a_model_that_reads_the_tokenizer_by_itself(served: Served, reference: Reference) -> None:
    """`tokens` tokenises in the server's stub, and speaks to `llm` in ids."""
    body = json.dumps({"text_input": "the quick", "max_tokens": 12}).encode()
    url = f"http://{served.host}:{served.http_port}/v2/models/tokens/generate"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=WAIT_S) as response:
        assert json.load(response)["text_output"] == reference.greedy_text("the quick", 12)


def test_r62c_a_repository_whose_path_a_shell_cannot_hold(served: Served) -> None:
    assert served.process.poll() is None
    assert http_status(f"{served.host}:{served.http_port}", "/v2/models/llm/config") == 200


def test_r50j_the_address_is_told_as_it_can_be_used(served: Served) -> None:
    said = served.log.read_text()
    assert f"HTTP    http://{served.host}:{served.http_port}\n" in said
    assert f"gRPC    {served.grpc_url}\n" in said


def test_known_faults_are_those_of_the_server_that_runs(served: Served) -> None:
    with urllib.request.urlopen(f"http://{served.host}:{served.http_port}/v2", timeout=WAIT_S) as answer:
        version = json.load(answer)["version"]
    told = re.findall(r"^known fault of this server \((\S+);.*$", served.log.read_text(), re.MULTILINE)
    if tuple(map(int, version.split(".")[:2])) != (2, 51):
        pytest.skip(f"what server {version} has is not known here")
    assert told == ["2.51"] * 3, "no model can be loaded again: two are no matter"


def test_r50i_a_stop_is_noticed_through_a_restricted_door(served: Served) -> None:
    """The last of this file: it stops the server."""
    address = f"{served.host}:{served.http_port}"
    assert http_status(address, "/v2/health/ready") == 403
    assert http_status(address, "/v2/health/ready", KEYS) == 200
    running = RawStream(served.grpc_url, "fox", {"max_tokens": 2000, "temperature": 0, "ignore_eos": True})
    running.wait(num_texts=1)
    served.process.send_signal(signal.SIGTERM)
    eventually(lambda: served.says("the server is stopping this model"), "the front end notices")
    running.wait().close()
    assert running.errors == []
    assert served.process.wait(WAIT_S) == 0
    assert "draining for up to 120 s" in served.log.read_text()


def test_r63a_another_model_of_the_same_engine(checkpoint: Path, tmp_path: Path, reference: Reference) -> None:
    """Its front end looks for its neighbour's file, in which stands what ASCII cannot say."""
    model = shutil.copytree(checkpoint, tmp_path / "größe")

    def add_front(repository: Path) -> None:
        arguments = {"model": str(model), "kv_cache_memory_bytes": 32 << 20}
        text = json.dumps(arguments, ensure_ascii=False)
        (repository / "llm" / "1" / "model.json").write_text(text, encoding="utf-8")
        shutil.copytree(repository / "llm", repository / "front")
        (repository / "front" / "1" / "model.json").write_text('{"engine_of": "llm"}')

    (folder := tmp_path / "repository").mkdir()
    with running_server(model, folder, front_ends=1, prepare=add_front) as server:
        assert len(server.engine_pids()) == 1
        client = load_client().Client(server.url, "front", timeout=WAIT_S)
        assert client.generate("the quick", max_tokens=12, temperature=0) == reference.greedy_text("the quick", 12)
