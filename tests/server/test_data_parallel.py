"""A model with two engines on a real server. pytest tests/server/test_data_parallel.py"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.server.conftest import MAX_NUM_SEQS, marked_processes, running_server
from tests.server.raw_stream import RawStream
from tests.server.test_streams import LONG, make_requests
from tests.server.tiny_checkpoint import Reference
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.server


def test_two_engines_under_two_front_ends(checkpoint: Path, tmp_path: Path, reference: Reference) -> None:
    with running_server(checkpoint, tmp_path, exit_timeout_secs=300, data_parallel_size=2) as server:
        engines = server.engine_pids()
        assert len(engines) == 2
        eventually(lambda: server.gauge("cb_engine_up", "llm") == 2, "both engines are up in /metrics")
        assert server.gauge("nv_trt_llm_request_metrics", "max") == 2 * MAX_NUM_SEQS, "the sum of both"

        requests = make_requests(16, seed=5)
        answers = [RawStream(server.url, prompt, {"max_tokens": n, "temperature": 0}) for prompt, n in requests]
        for (prompt, max_tokens), stream in zip(requests, answers, strict=True):
            stream.wait().close()
            assert stream.errors == []
            assert stream.text == reference.greedy_text(prompt, max_tokens)
        server.wait_idle()

        streams = [RawStream(server.url, f"stream {i}", LONG) for i in range(8)]
        for stream in streams:
            stream.wait(num_texts=2)
        os.kill(engines[0], signal.SIGKILL)

        def is_over() -> bool:
            """Whether as many requests are left as streams, so that every stream that will hear of it has."""
            num_failed = sum(bool(stream.errors) for stream in streams)
            return num_failed > 0 and server.num_active_requests() == len(streams) - num_failed

        eventually(is_over, "the dead engine's requests hear of it")
        failed = [stream for stream in streams if stream.errors]
        alive = [stream for stream in streams if stream not in failed]
        assert failed
        assert alive
        for stream in alive:
            stream.wait(num_texts=stream.num_texts + 5)
            assert stream.errors == [], "the other engine goes on"
        answer = RawStream(server.url, "fox", {"max_tokens": 8, "temperature": 0}).wait()
        answer.close()
        assert answer.text == reference.greedy_text("fox", 8), "served while one engine is away"
        eventually(lambda: len(server.engine_pids()) == 2, "the dead engine is replaced")
        eventually(lambda: server.gauge("cb_engine_restarts_total", "llm") == 1, "the restart is counted once")
        assert engines[1] in server.engine_pids()
        for stream in streams:
            stream.close(cancel=True)
        server.wait_idle()

        draining = RawStream(server.url, "fox", {"max_tokens": 20, "temperature": 0}).wait(num_texts=1)
        server.process.terminate()
        draining.wait().close()
        assert draining.text == reference.greedy_text("fox", 20), "a running request goes on while the server drains"
        assert server.process.wait(WAIT_S) is not None
        eventually(lambda: marked_processes(server.mark) == [], "both engines have ended")
