"""Metrics read right after an answer know of it. pytest tests/server/test_idle_metrics.py"""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from tests.server.conftest import RunningServer, running_server
from tests.server.test_wire import GREEDY, ask
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.server


def value(server: RunningServer, pattern: str) -> float:
    with urllib.request.urlopen(f"http://{server.process.metrics_address}/metrics", timeout=WAIT_S) as response:
        found = re.findall(rf"^{pattern} (\S+)$", response.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def test_an_idle_server_has_counted_what_its_clients_have_got(checkpoint: Path, tmp_path: Path) -> None:
    """Requests, histograms, and the engine's own counts. Before the final response is seen, if telling them takes no
    more than its share of the time, which a busy machine may not give (`tests/serving/test_publisher.py`)."""
    with running_server(checkpoint, tmp_path, front_ends=1) as server:
        num_tokens = 0
        for number in range(1, 6):
            for stream in (True, False):
                ask(server, "the quick brown fox", GREEDY, stream)
            num_tokens += 2 * GREEDY["max_tokens"]
            for pattern, expected in (
                ('cb_requests_total{.*outcome="length".*}', 2 * number),
                (r"cb_e2e_request_latency_seconds_count{.*}", 2 * number),
                (r"cb_time_to_first_token_seconds_count{.*}", 2 * number),
                (r"cb_output_tokens_total{.*}", num_tokens),
            ):
                eventually(lambda p=pattern, e=expected: value(server, p) == e, f"{pattern} is {expected}")
            server.wait_idle()
