"""The load test against a scripted server: its figures must agree with what the script did and when.

The server speaks the KServe gRPC stream with tritonclient's messages, in a thread of the test's process. It notes
when it sent each response, on the same monotonic clock, so client times have an independent reference.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import load_test
import pytest

from tests.client.conftest import CLIENT_DIR
from tests.client.scripted_server import Script, ScriptedServer
from tests.waiting import WAIT_S, eventually


def run_main(tmp_path: Path, address: str, *options: str) -> tuple[int, dict[str, Any], list[dict[str, Any]], str]:
    """(exit code, result, history rows, HTML) of a load test."""
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html", "history")}
    written = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    code = load_test.main(["--url", address, "--seed", "7", *options, *written])
    history = [json.loads(line) for line in files["history"].read_text().splitlines()]
    return code, json.loads(files["json"].read_text()), history, files["html"].read_text()


def _one_refusal_one_error(index: int, request: dict[str, Any]) -> Script:
    if request["id"] == "3":
        return Script([], error=(grpc.StatusCode.UNAVAILABLE, "the queue is full"))
    if request["id"] == "5":
        return Script([(0.0, 1)], error=(grpc.StatusCode.INTERNAL, "engine died"))
    return Script([(0.1, 1), (0.04, 1), (0.08, 2)])


def test_open_loop_end_to_end(
    server: tuple[ScriptedServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, address = server
    servicer.script = _one_refusal_one_error
    code, result, history, page = run_main(
        tmp_path, address, "--rate", "20", "40", "--arrival", "constant", "--num-requests", "20",
        "--warm-up", "2", "--output-len", "4", "--input-len", "103",
        "--slo-ttft-ms", "500000", "--slo-tpot-ms", "500000", "--label", "A <first>",
    )  # fmt: skip
    assert code == 0
    # The probe: 40 and 440 words at 2 tokens a word and 3 more, so that 103 tokens are 50 words.
    assert result["prompts"] == {"tokens_per_word": 2.0, "num_extra_tokens": 3.0, "source": "server"}
    assert {len(r["text_input"].split()) for r in servicer.requests if r["id"].isdigit()} == {50}
    assert len(servicer.requests) == 2 + 2 * (20 + 2)
    for run, rate in zip(result["runs"], (20, 40), strict=True):
        figures = run["summary"]
        assert [figures[f"num_{k}"] for k in ("requests", "ok", "refused", "error", "cancelled")] == [20, 18, 1, 1, 0]
        assert figures["output_tokens"] == 18 * 4 + 1
        assert figures["errors"] == {"UNAVAILABLE: the queue is full": 1, "INTERNAL: engine died": 1}
        # What the server waits; what a busy machine adds is not for a test to say.
        assert figures["ttft_ms"]["p50"] >= 100
        assert figures["e2e_ms"]["p50"] >= 220
        assert figures["goodput_share"] == 18 / 20
        assert run["client"]["num_processes"] == 1
        assert figures["duration_s"] > 20 / rate + 0.2
    assert len(history) == 40
    assert sorted(row["scheduled_s"] for row in history[:20]) == pytest.approx([i / 20 for i in range(1, 21)])
    assert all(row["sent_s"] >= row["scheduled_s"] for row in history)
    finished = [row for row in history if row["status"] == "ok"]
    assert all(row["sent_s"] <= row["written_s"] <= row["end_s"] for row in finished)
    assert all([n for _, n in row["chunks"]] == [1, 1, 2] and row["finish_reason"] == "length" for row in finished)
    table = capsys.readouterr().out
    assert "TTFT p99 [ms]" in table
    assert "40 requests/s" in table
    assert page.count("<svg") == 5 + 2 + 5  # CDFs, over time, against load
    assert "A &lt;first&gt;" in page
    assert "engine died" in page
    assert not any(text in page for text in ("<script", "src=", "@import", "<link"))  # needs nothing beside itself


@pytest.fixture
def metrics_url() -> Iterator[str]:
    """A /metrics page on which this model's preemptions go from 2 to 5 between two visits, and another model's too."""
    values = iter((2, 5))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            value = next(values)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                f'# TYPE x_preemptions_total counter\nx_preemptions_total{{model="llm"}} {value}\n'
                f'x_preemptions_total{{model="other"}} {100 * value}\n# TYPE g gauge\ng {value}\n'.encode()
            )

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    web = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{web.server_port}/metrics"
    web.shutdown()
    web.server_close()


def test_closed_loop_keeps_its_streams_and_cancels(
    server: tuple[ScriptedServer, str], metrics_url: str, tmp_path: Path
) -> None:
    servicer, address = server
    servicer.script = lambda index, request: Script([(0.01, 1)] * 6)
    code, result, history, page = run_main(
        tmp_path, address, "--concurrency", "5", "--num-requests", "40", "--processes", "2", "--warm-up", "0",
        "--output-len", "6", "--cancel-fraction", "0.3", "--tokens-per-word", "1", "--metrics-url", metrics_url,
    )  # fmt: skip
    figures = result["runs"][0]["summary"]
    assert code == 0
    assert sorted(row["id"] for row in history) == list(range(40))
    assert 4 <= figures["num_cancelled"] <= 20
    assert figures["num_ok"] + figures["num_cancelled"] == 40
    assert figures["cancelled_share"] == figures["num_cancelled"] / 40
    events = sorted([(row["sent_s"], 1) for row in history] + [(row["end_s"], -1) for row in history])
    level, highest = 0, 0
    for _, step in events:
        level += step
        highest = max(highest, level)
    assert 1 <= highest <= 5
    assert all(row["sent_s"] >= row["scheduled_s"] for row in history)
    assert result["runs"][0]["client"]["num_processes"] == 2
    assert result["runs"][0]["server"] == {
        "num_preemptions": 3.0,
        "preemptions_per_request": 3.0 / figures["num_ok"],
        "counters": {"x_preemptions_total": 3.0},
    }
    assert "x_preemptions_total" in page


def test_duration_and_drain_bound_a_run(server: tuple[ScriptedServer, str], tmp_path: Path) -> None:
    servicer, address = server
    servicer.script = lambda index, request: Script([(0.0, 1), (60.0, 1)])
    code, result, history, _ = run_main(
        tmp_path, address, "--concurrency", "3", "--duration", "0.5", "--drain-timeout", "0.2",
        "--warm-up", "0", "--tokens-per-word", "1",
    )  # fmt: skip
    assert code == 1
    assert {row["status"] for row in history} == {"unfinished"}
    assert len(history) <= 3
    num_tokens = sum(count for row in history for _, count in row["chunks"])
    assert result["runs"][0]["summary"]["output_tokens"] == num_tokens <= 3


def test_ctrl_c_reports_what_was_done(server: tuple[ScriptedServer, str], tmp_path: Path) -> None:
    servicer, address = server
    servicer.script = lambda index, request: Script([(0.02, 1)] * 2 if index < 5 else [(0.0, 1), (60.0, 1)])
    command = [
        sys.executable, str(CLIENT_DIR / "load_test.py"), "--url", address, "--rate", "inf", "--num-requests", "8",
        "--warm-up", "0", "--tokens-per-word", "1", "--json", str(tmp_path / "out.json"),
    ]  # fmt: skip
    # A shell's background job ignores Ctrl-C, and so would the script that it starts.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=heed)
    eventually(lambda: len(servicer.requests) == 8, "all are sent")
    time.sleep(0.5)  # in which the five short answers mostly come
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to every process of the group
    _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["was_interrupted"] is True
    summary = result["runs"][0]["summary"]
    assert summary["num_ok"] + summary["num_unfinished"] == 8
    assert summary["num_ok"] <= 5


def test_the_terminal_says_why_requests_failed(
    server: tuple[ScriptedServer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it a trace of prompts that are too long ends in a bare count of errors."""
    servicer, address = server
    reasons = ["the prompt is too long"] * 4 + ["the queue is full"] * 3 + ["a", "b", "c"]
    servicer.script = lambda index, request: Script([], error=(grpc.StatusCode.INTERNAL, reasons[index]))
    options = ["--rate", "inf", "--num-requests", "10", "--warm-up", "0", "--tokens-per-word", "1"]
    assert load_test.main(["--url", address, *options]) == 1
    said = capsys.readouterr().err
    assert "inf requests/s: 4 failed: INTERNAL: the prompt is too long" in said
    assert "inf requests/s: 3 failed: INTERNAL: the queue is full" in said
    assert said.count("1 failed: INTERNAL: ") == 1
    assert "2 further kinds of errors" in said


@pytest.mark.parametrize("option", ["--json", "--html", "--history"])
def test_a_file_that_cannot_be_written_is_said_before_the_run(
    option: str, server: tuple[ScriptedServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, address = server
    arguments = ["--url", address, "--rate", "1", option]
    assert load_test.main([*arguments, str(tmp_path / "nowhere" / "out")]) == 2
    assert f"{option} {tmp_path}/nowhere/out: there is no folder {tmp_path}/nowhere" in capsys.readouterr().err
    assert load_test.main([*arguments, str(tmp_path)]) == 2
    assert "it is a folder; name a file" in capsys.readouterr().err
    assert servicer.requests == []


def test_figures_are_told_where_the_report_cannot_be_written(
    server: tuple[ScriptedServer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, address = server
    options = ["--rate", "inf", "--num-requests", "2", "--warm-up", "0", "--tokens-per-word", "1"]
    assert load_test.main(["--url", address, *options, "--json", "/dev/full"]) == 2
    told = capsys.readouterr()
    assert "No space left on device" in told.err
    assert "TTFT p99 [ms]" in told.out


def test_options_that_are_no_json_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for text, complaint in (("{a", "not valid JSON: "), ("[1]", "must be a JSON object, got [1]")):
        with pytest.raises(SystemExit):
            load_test.main(["--rate", "1", "--sampling", text])
        assert f"argument --sampling: {complaint}" in capsys.readouterr().err


def test_no_server_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_test.main(["--url", "127.0.0.1:1", "--rate", "1"]) == 2
    assert "no server takes requests at 127.0.0.1:1" in capsys.readouterr().err


def test_h12_a_server_that_cannot_say_what_it_serves_is_measured(
    server: tuple[ScriptedServer, str], tmp_path: Path
) -> None:
    """The scripted one knows requests alone."""
    code, _, history, _ = run_main(tmp_path, server[1], "--rate", "50", "--num-requests", "3", "--model", "any")
    assert code == 0
    assert len(history) == 3
