"""The load test's own measurements beside the server's /metrics: pytest tests/server/test_load_against_metrics.py

Two clocks see the same requests: the client's from the scheduled send to the arrival of each response, the front end's
from the request's arrival to the handing over of each response. The client's is longer by the way there and back, which
takes as long as the machine is busy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cb_backend.cli.paths import checkout_path
from tests.server.conftest import RunningServer
from tests.server.metrics_text import Snapshot, ended, settled

pytestmark = pytest.mark.server

NUM_REQUESTS, NUM_STREAMS, NUM_TOKENS = 48, 6, 24
LATENCIES = {  # histogram -> the load test's name
    "cb_time_to_first_token_seconds": "ttft_ms",
    "cb_e2e_request_latency_seconds": "e2e_ms",
    "cb_inter_token_latency_seconds": "itl_token_ms",
}


def load_test(server: RunningServer, result: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(checkout_path("client/load_test.py")), "--url", server.url, "--json", str(result)]
    command += ["--concurrency", str(NUM_STREAMS), "--num-requests", str(NUM_REQUESTS), "--warm-up", "0"]
    command += ["--input-len", "12", "--output-len", str(NUM_TOKENS), "--tokens-per-word", "4"]  # no probe is sent
    command += ["--sampling", '{"ignore_eos": true}']
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def grown(before: Snapshot, after: Snapshot, name: str) -> tuple[float, float]:
    """(count, sum) that a histogram gained."""
    (old_count, old_total), (count, total) = before.histogram(name), after.histogram(name)
    return count - old_count, total - old_total


def lower_edge(before: Snapshot, after: Snapshot, name: str, share: float) -> float:
    """Of the bucket in which the quantile `share` of the values between two readings lies."""
    gained = []
    for (sample, labels), value in after.families[name].samples.items():
        edge = dict(labels).get("le")
        if sample == f"{name}_bucket" and dict(labels)["model"] == "llm" and edge is not None:
            family = before.families.get(name)
            gained.append((float(edge), value - (family.samples.get((sample, labels), 0.0) if family else 0.0)))
    gained.sort()
    index = next(index for index, (_, count) in enumerate(gained) if count >= share * gained[-1][1])
    return gained[index - 1][0] if index else 0.0


def test_latencies_and_gauges_agree_with_the_load_test(server: RunningServer, tmp_path: Path) -> None:
    """Counts are equal, the client's means and medians never the shorter ones, gauges within what is in flight."""
    before = settled(server, 0)
    running: list[float] = []
    process = load_test(server, tmp_path / "result.json")
    while process.poll() is None:
        # One gauge: of two, the one may be of a later moment than the other.
        running.append(Snapshot(server).value("nv_trt_llm_request_metrics", request_type="active"))
    assert process.returncode == 0, process.communicate()[0]
    after = settled(server, ended(before) + NUM_REQUESTS)
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())["runs"][0]["summary"]
    assert (result["num_ok"], result["num_wrong_length"]) == (NUM_REQUESTS, 0)
    assert max(running) <= NUM_STREAMS

    for name, key in LATENCIES.items():
        count, total = grown(before, after, name)
        untold = after.value("cb_unobserved_values_total", histogram=name)
        untold -= before.value("cb_unobserved_values_total", histogram=name)
        expected = NUM_REQUESTS * (NUM_TOKENS - 1 if key == "itl_token_ms" else 1)
        assert count + untold == expected, name
        client_mean, server_mean = result[key]["mean"] / 1e3, total / count
        if key != "itl_token_ms":  # gaps: what a response is late at one end it is early at the other
            assert 0 < server_mean <= client_mean, name
            assert lower_edge(before, after, name, 0.5) <= result[key]["p50"] / 1e3, name
    for counter, expected in (
        ("cb_output_tokens_total", NUM_REQUESTS * NUM_TOKENS),
        ("cb_responses_total", round(result["responses_per_s"] * result["duration_s"])),
    ):
        assert after.value(counter) - before.value(counter) == expected, counter
