"""Case V7 on a real server: clients that stop reading beside good ones. pytest tests/server/test_slow_reader.py

This server (24.10) takes every response at once and keeps what is not read, so nobody waits for anybody, and a request
that nobody reads ends as others do. Servers that let a send wait are played in tests/serving/test_slow_readers.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.conftest import RunningServer
from tests.server.raw_stream import RawStream
from tests.server.tiny_checkpoint import Reference
from tests.waiting import eventually

pytestmark = pytest.mark.server

NUM_TOKENS = 400
GREEDY = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
MOST_KEPT_BYTES = 4096  # for each response that waits to be read


def memory_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def test_v7_ten_good_clients_beside_three_that_do_not_read(server: RunningServer, reference: Reference) -> None:
    stuck = [RawStream(server.url, f"stuck {i}", GREEDY, num_to_read=1) for i in range(3)]
    for stream in stuck:
        stream.wait(num_texts=1)
    before = memory_bytes(server.process.pid)
    good = [RawStream(server.url, f"fox {i}", {**GREEDY, "max_tokens": 60}) for i in range(10)]
    for i, stream in enumerate(good):
        stream.wait()
        assert stream.text == reference.greedy_text(f"fox {i}", 60)
        stream.close()
    server.wait_idle()  # those that nobody reads have ended too: their blocks are free
    assert memory_bytes(server.process.pid) - before < len(stuck) * NUM_TOKENS * MOST_KEPT_BYTES
    for i, stream in enumerate(stuck[:2]):
        assert stream.num_finals == 0
        stream.read_on()
        stream.wait()
        assert stream.text == reference.greedy_text(f"stuck {i}", NUM_TOKENS)
    for stream in stuck:
        stream.close(cancel=True)
    server.wait_idle()


def test_v7_a_client_that_does_not_read_can_be_cancelled(server: RunningServer) -> None:
    """Its blocks are free soon after it has gone, though what it was sent has never been read."""
    stuck = RawStream(server.url, "stuck", {**GREEDY, "max_tokens": 10000}, num_to_read=1)
    stuck.wait(num_texts=1)
    eventually(lambda: server.num_active_requests() == 1, "the request runs")
    stuck.close(cancel=True)
    server.wait_idle()
