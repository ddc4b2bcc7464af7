"""Metrics read right after an answer know of it. pytest tests/server/test_idle_metrics.py"""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from tests.server.conftest import RunningServer, running_server
from tests.server.test_wire import GREEDY, ask

pytestmark = pytest.mark.server


def value(server: RunningServer, pattern: str) -> float:
    with urllib.request.urlopen(f"http://{server.process.metrics_address}/metrics", timeout=10) as response:
        found = re.findall(rf"^{pattern} (\S+)$", response.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def test_an_idle_server_has_counted_what_its_clients_have_got(checkpoint: Path, tmp_path: Path) -> None:
    """Requests, histograms, and the engine's own counts: all of them before the final response is seen."""
    with running_server(checkpoint, tmp_path, front_ends=1) as server:
        num_tokens = 0
        for number in range(1, 6):
            for stream in (True, False):
                ask(server, "the quick brown fox", GREEDY, stream)
            num_tokens += 2 * GREEDY["max_tokens"]
            assert value(server, 'cb_requests_total{.*outcome="length".*}') == 2 * number
            assert value(server, r"cb_e2e_request_latency_seconds_count{.*}") == 2 * number
            assert value(server, r"cb_time_to_first_token_seconds_count{.*}") == 2 * number
            assert value(server, r"cb_output_tokens_total{.*}") == num_tokens
            assert server.num_used_blocks() == server.num_active_requests() == 0.0
