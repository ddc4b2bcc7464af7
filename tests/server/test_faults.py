"""Processes that die or are told to end, several front ends, a broken model. pytest tests/server/test_faults.py"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from cb_backend.cli.paths import CliError
from cb_backend.cli.server.addresses import http_status
from cb_backend.cli.server.processes import descendants
from cb_backend.cli.server.server_process import free_ports
from tests.server.conftest import RunningServer, marked_processes, running_server
from tests.server.raw_stream import RawStream
from tests.server.test_streams import LONG
from tests.server.tiny_checkpoint import Reference
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.server

SHORT = {"max_tokens": 8, "temperature": 0}


def test_two_front_ends_share_one_engine(server: RunningServer) -> None:
    assert len(server.engine_pids()) == 1


def test_engine_killed_under_8_streams(server: RunningServer, reference: Reference) -> None:
    streams = [RawStream(server.url, f"stream {i}", LONG) for i in range(8)]
    for stream in streams:
        stream.wait(num_texts=2)
    (engine,) = server.engine_pids()
    os.kill(engine, signal.SIGKILL)
    for stream in streams:
        stream.wait().close()
        assert len(stream.errors) == 1
        assert stream.num_finals == 1
    texts: list[str] = []

    def is_served() -> bool:
        attempt = RawStream(server.url, "fox", SHORT).wait()
        attempt.close()
        texts.append(attempt.text)
        return not attempt.errors  # refused while the engine starts

    eventually(is_served, "requests are served again")
    assert texts[-1] == reference.greedy_text("fox", SHORT["max_tokens"])
    assert len(server.engine_pids()) == 1
    assert engine not in server.engine_pids()
    server.wait_idle()


def test_v1_v2_sigterm_drains_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """Case V2: long answers get a final error in time.

    Case V1: it is not ready from then on, and what comes is refused. (By server 24.10 itself, with "unknown model":
    nothing of ours is asked. So readiness is what clients have to go by.)
    """
    with running_server(checkpoint, tmp_path, front_ends=1, exit_timeout_secs=10) as server:
        assert len(server.engine_pids()) == 1
        long = [RawStream(server.url, f"long {i}", LONG) for i in range(3)]
        for stream in long:
            stream.wait(num_texts=1)
        server.process.terminate()
        is_ready = lambda: http_status(server.process.http_address, "/v2/models/llm/ready") == 200  # noqa: E731
        eventually(lambda: not is_ready(), "the server says that it is not ready")

        def is_refused() -> bool:
            late = RawStream(server.url, "late", SHORT).wait()
            late.close()
            return len(late.errors) == 1

        eventually(is_refused, "what comes is refused")  # its ports close one after the other, gRPC's not as the first
        for stream in long:
            stream.wait()
            stream.close()  # NOTE: a stream that its client keeps open keeps the server from ending
            assert len(stream.errors) == 1
            assert stream.num_finals == 1
        assert server.process.wait(WAIT_S) is not None  # 0, if it was done before its limit
        eventually(lambda: marked_processes(server.mark) == [], "every process of the server has ended")


def test_v2_sigterm_is_noticed_also_while_http_streams_are_open(
    checkpoint: Path, tmp_path: Path, reference: Reference
) -> None:
    """Then a stopping server (24.10) resets every new connection, that of our probe too, instead of answering it.

    Case V2: short answers complete, however long the machine takes over them.
    """
    with running_server(checkpoint, tmp_path, front_ends=1, exit_timeout_secs=300) as server:
        body = json.dumps({"text_input": "long", "stream": True, **LONG}).encode()
        url = f"http://{server.process.http_address}/v2/models/llm/generate_stream"
        with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=WAIT_S) as stream:
            assert b"text_output" in stream.readline()
            short = [RawStream(server.url, "fox", {"max_tokens": 20, "temperature": 0}) for _ in range(3)]
            for answer in short:
                answer.wait(num_texts=1)
            server.process.terminate()
            said = "the server is stopping this model"
            log = lambda: "\n".join(server.process.last_lines(60))  # noqa: E731
            eventually(lambda: said in log(), "the front end says that it drains")
            assert b"error" not in stream.readline() + stream.readline() + stream.readline()  # it goes on meanwhile
            for answer in short:
                answer.wait().close()
                assert answer.errors == []
                assert answer.text == reference.greedy_text("fox", 20)
        eventually(lambda: marked_processes(server.mark) == [], "every process of the server has ended")


def test_a_killed_server_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    shared_memory = Path("/dev/shm")
    with running_server(checkpoint, tmp_path) as server:
        regions = {entry for entry in shared_memory.iterdir() if any(map(_is_mapping(entry), _stubs(server)))}
        assert len(regions) == 2, "one for each front end"
        streams = [RawStream(server.url, f"stream {i}", LONG) for i in range(4)]
        for stream in streams:
            stream.wait(num_texts=2)
        os.kill(server.process.pid, signal.SIGKILL)  # not through `ServerProcess`, which would clean up after it
        eventually(lambda: marked_processes(server.mark) == [], "front ends and engine end by themselves")
        assert not any(region.exists() for region in regions)


# A front end in whose process a thread takes Python's lock for ever, as soon as the file is there: a call into C that
# does not return and keeps it, as `Metric.set` of server 24.10 is one when the server dies before it has answered.
HOLDING_MODEL = """
import ctypes, os, pathlib, threading, time
from cb_backend.serving.backend import TritonPythonModel as FrontEnd

FOLDER = pathlib.Path({folder!r})

class TritonPythonModel(FrontEnd):
    def initialize(self, args):
        super().initialize(args)
        threading.Thread(target=hold, daemon=True).start()

def hold():
    while not (FOLDER / "hold").exists():
        time.sleep(0.01)
    (FOLDER / f"held-{{os.getpid()}}").touch()
    ctypes.PyDLL(None).pause()
"""


def test_a_killed_server_leaves_nothing_though_front_ends_are_stuck(checkpoint: Path, tmp_path: Path) -> None:
    def prepare(repository: Path) -> None:
        (repository / "llm" / "1" / "model.py").write_text(HOLDING_MODEL.format(folder=str(tmp_path)))

    with running_server(checkpoint, tmp_path / "repository", prepare=prepare) as server:
        regions = {entry for entry in Path("/dev/shm").iterdir() if any(map(_is_mapping(entry), _stubs(server)))}
        assert len(regions) == 2, "one for each front end"
        (tmp_path / "hold").touch()
        eventually(lambda: len(list(tmp_path.glob("held-*"))) == 2, "both front ends are stuck")
        os.kill(server.process.pid, signal.SIGKILL)
        eventually(lambda: marked_processes(server.mark) == [], "the engine ends them, and itself")
        assert not any(region.exists() for region in regions)


def _stubs(server: RunningServer) -> list[int]:
    processes = [process.pid for process in descendants(server.process.pid)]
    return [pid for pid in processes if "triton_python_backend_stub" in Path(f"/proc/{pid}/cmdline").read_text()]


def _is_mapping(file: Path) -> Callable[[int], bool]:
    return lambda pid: str(file) in Path(f"/proc/{pid}/maps").read_text()


def test_four_front_ends_share_one_engine(checkpoint: Path, tmp_path: Path, reference: Reference) -> None:
    with running_server(checkpoint, tmp_path, front_ends=4) as server:
        assert len(server.engine_pids()) == 1
        streams = [RawStream(server.url, f"fox {i}", SHORT) for i in range(16)]
        for i, stream in enumerate(streams):
            stream.wait().close()
            assert stream.errors == []
            assert stream.text == reference.greedy_text(f"fox {i}", SHORT["max_tokens"])
        server.wait_idle()


def test_a_broken_checkpoint_is_one_clear_line(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CliError) as raised, running_server(broken, tmp_path / "repository"):
        pass
    reason = str(raised.value)
    assert reason.startswith("model 'llm' could not be loaded: ")
    assert "\n" not in reason
    assert "model.safetensors" in reason


def test_serve_command_from_start_to_sigterm(checkpoint: Path, tmp_path: Path) -> None:
    http_port, grpc_port, metrics_port = free_ports(3)
    ports = [f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}"]
    command = [sys.executable, "-m", "cb_backend.cli.main", "serve", "--model", str(checkpoint), *ports]
    mark = tmp_path.name
    log = tmp_path / "serve.log"
    environment = {**os.environ, "CB_BACKEND_TEST_SERVER": mark, "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        serve = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        for said in ("starting", "started engine", "ready after", "client/generate.py"):  # each takes its time
            eventually(lambda said=said: said in log.read_text() or serve.poll() is not None, said)
        assert "ready: llm" in log.read_text(), log.read_text()
        assert f"http://127.0.0.1:{http_port}/v2/models/llm/generate" in log.read_text()
        assert http_status(f"127.0.0.1:{http_port}", "/v2/models/llm/ready") == 200
        serve.send_signal(signal.SIGTERM)
        assert serve.wait(WAIT_S) == 0
        assert "draining for up to 30 s" in log.read_text()
        assert "Traceback" not in log.read_text()
        eventually(lambda: marked_processes(mark) == [], "every process of the server has ended")
    finally:
        print(log.read_text())  # shown by pytest where the test fails
        serve.kill()
