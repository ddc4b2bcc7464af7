"""A model over two processes on a real server. pytest tests/server/test_ranks.py"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cb_backend.cli.server.processes import descendants
from tests.server.conftest import RunningServer, _command_line, marked_processes, running_server
from tests.server.raw_stream import RawStream
from tests.server.test_streams import LONG, make_requests
from tests.server.tiny_checkpoint import Reference
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.server

STOPPED_S = 5.0
BEGUN_S = 1.0  # after which a step with new prompts has begun


def worker_pids(server: RunningServer) -> list[int]:
    """The processes of ranks above 0."""
    return [
        process.pid
        for process in descendants(server.process.pid)
        if "cb_backend.engine.worker_process" in _command_line(process.pid)
    ]


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(checkpoint, tmp_path_factory.mktemp("ranks"), tensor_parallel_size=2) as running:
        yield running


def check_serving(server: RunningServer, reference: Reference) -> None:
    """Answers are right, and of the right ranks."""
    streams = [
        (RawStream(server.url, prompt, {"max_tokens": n, "temperature": 0}), reference.greedy_text(prompt, n))
        for prompt, n in make_requests(6, seed=3)
    ]
    for stream, text in streams:
        stream.wait().close()
        assert (stream.errors, stream.text) == ([], text)
    server.wait_idle()


def test_two_ranks_serve_what_one_would(server: RunningServer, reference: Reference) -> None:
    assert len(server.engine_pids()) == len(worker_pids(server)) == 1
    check_serving(server, reference)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["prefill", "decoding", "idle"])
def test_a_killed_rank_ends_all_streams_and_is_replaced(
    rank: int, when: str, server: RunningServer, reference: Reference
) -> None:
    engines, workers = server.engine_pids(), worker_pids(server)
    if when == "prefill":
        os.kill(workers[0], signal.SIGSTOP)  # so that the prompts' step does not end
    streams = [RawStream(server.url, f"stream {i}", LONG) for i in range(0 if when == "idle" else 4)]
    if when == "prefill":
        time.sleep(BEGUN_S)
    else:
        for stream in streams:
            stream.wait(num_texts=2)
    os.kill((engines, workers)[rank][0], signal.SIGKILL)
    for stream in streams:
        stream.wait().close()
        assert len(stream.errors) == 1, "an end, and one only"
        assert (stream.text == "") == (when == "prefill")
    eventually(
        lambda: server.engine_pids() not in ([], engines) and worker_pids(server) not in ([], workers),
        "both ranks are new",
    )
    eventually(lambda: server.gauge("cb_engine_up", "llm") == 1, "the engine is up again")
    assert len(worker_pids(server)) == 1, "the old ranks have ended"
    check_serving(server, reference)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_that_is_killed_while_it_loads_is_replaced_again(
    rank: int, server: RunningServer, reference: Reference
) -> None:
    """The start that it was part of fails; the next one does not."""
    engines, workers = server.engine_pids(), worker_pids(server)
    os.kill(workers[0], signal.SIGKILL)
    eventually(lambda: worker_pids(server) not in ([], workers), "rank 1 is started anew")
    loading = (server.engine_pids(), worker_pids(server))
    assert loading[0] != engines
    os.kill(loading[rank][0], signal.SIGKILL)
    eventually(lambda: server.gauge("cb_engine_up", "llm") == 1, "the engine is up again")
    eventually(
        lambda: loading[rank][0] not in server.engine_pids() + worker_pids(server) and len(worker_pids(server)) == 1,
        "both ranks are new",
    )
    check_serving(server, reference)


def test_a_rank_that_stands_still_for_a_while_goes_on(server: RunningServer, reference: Reference) -> None:
    engines, (worker,) = server.engine_pids(), worker_pids(server)
    stream = RawStream(server.url, "fox", {"max_tokens": 200, "temperature": 0}).wait(num_texts=2)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(worker, signal.SIGCONT)
    stream.wait().close()
    assert (stream.errors, stream.text) == ([], reference.greedy_text("fox", 200))
    assert (server.engine_pids(), worker_pids(server)) == (engines, [worker])


@pytest.mark.long
def test_a_rank_that_stands_still_for_ever_is_replaced(checkpoint: Path, tmp_path: Path, reference: Reference) -> None:
    """The watchdog ends rank 0; the stopped one, which cannot see it, must end as well."""
    with running_server(checkpoint, tmp_path, tensor_parallel_size=2, watchdog_timeout_s=15) as server:
        (worker,) = worker_pids(server)
        stream = RawStream(server.url, "stream", LONG).wait(num_texts=2)
        os.kill(worker, signal.SIGSTOP)
        stream.wait().close()
        assert len(stream.errors) == 1
        eventually(lambda: worker_pids(server) not in ([], [worker]), "there is a new rank 1")
        eventually(lambda: _command_line(worker) == "", "the stopped one has ended")
        eventually(lambda: server.gauge("cb_engine_up", "llm") == 1, "the engine is up again")
        check_serving(server, reference)
        server.process.terminate()
        assert server.process.wait(WAIT_S) is not None
        eventually(lambda: marked_processes(server.mark) == [], "all ranks have ended")
