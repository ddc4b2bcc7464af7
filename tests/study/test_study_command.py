"""`cb-backend study` from the command line, on a tiny real engine: pytest tests/study/test_study_command.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cb_backend.cli.main import main
from cb_backend.study import load_watch, sweep
from tests.cli.test_bench_command import CONFIG
from tests.study.made_up import step_times

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.{second % 10}000000,{20 + 7 * second % 50},{2 + 5 * second % 12}\n"
    for second in range(40)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    arguments = {"load_format": "dummy", "device": "cpu", "num_gpu_blocks_override": 100}
    return ["--model", str(folder), "--engine-args", json.dumps(arguments)]


GRID = ["--max-num-seqs", "2,4", "--max-num-batched-tokens", "16,64"]


def test_simulated_and_confirmed(
    trace: Path, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calibrates the engine, simulates the grid, runs the recommendation for real; all files are written."""
    out, html, times = tmp_path / "out.json", tmp_path / "out.html", tmp_path / "times.json"
    files = ["--json", str(out), "--html", str(html), "--save-times", str(times)]
    flags = ["--trace", str(trace), "--num-requests", "12", "--rate", "40", "--simulate", "--cpu-time"]
    assert main(["study", *flags, *GRID, *tiny, *files]) == 0
    printed = capsys.readouterr()
    result = json.loads(out.read_text())
    assert (result["requests"], result["rate"], result["is_simulated"]) == (12, 40.0, True)
    settings = [(one["max_num_seqs"], one["max_num_batched_tokens"]) for one in result["trials"]]
    assert settings == [(2, 16), (2, 64), (4, 16), (4, 64)]
    assert tuple(result["recommended"].values()) in settings
    assert result["cache"] == "100 KV blocks of 16 tokens"
    assert all(check["measured"] > 0 for check in result["checks"])
    assert len(result["checks"]) == 7
    assert json.loads(times.read_text())["num_blocks"] == 100
    assert f"  {json.dumps(result['recommended'])}\n" in printed.out
    assert html.read_text().count("<svg") == 8
    assert "calibrating" in printed.err
    assert "4 seqs, 64 tokens, all at once" in printed.err

    # The same again without an engine, from the saved step times: the same recommendation in the same words.
    assert main(["study", *flags, *GRID, "--times", str(times), "--no-confirm", "--json", str(out)]) == 0
    again = json.loads(out.read_text())
    assert again["recommended"] == result["recommended"]
    assert again["comparison"] == result["comparison"]
    assert again["checks"] == []


def test_all_real(trace: Path, tiny: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--trace", str(trace), "--num-requests", "8", "--rate", "100", "--json", str(out)]
    assert main(["study", *flags, *GRID, *tiny]) == 0
    result = json.loads(out.read_text())
    assert not result["is_simulated"]
    assert len(result["trials"]) == 3  # both batches at one budget, the other budget at the better batch
    assert result["comparison"]["static"]["at_once"]["output_tokens_per_s"] > 0
    assert len(result["checks"]) == 7


def test_lengths_from_distributions_and_a_rate_that_is_found(tmp_path: Path) -> None:
    times, out = tmp_path / "times.json", tmp_path / "out.json"
    step_times().save(times)
    flags = ["--input-len", "uniform:10:50", "--output-len", "20", "--num-requests", "30", "--json", str(out)]
    how = ["--simulate", "--no-confirm", "--times", str(times)]
    assert main(["study", *flags, *how, "--max-num-seqs", "8", "--max-num-batched-tokens", "64,128"]) == 0
    result = json.loads(out.read_text())
    best = max(one["at_once"]["requests_per_s"] for one in result["trials"])
    assert result["rate"] == pytest.approx(0.8 * best, rel=0.05)
    assert any("nearly the same length" in text for text in result["warnings"])


@pytest.mark.parametrize(("num_tried", "code"), [(0, None), (1, 130), (2, 130)])
def test_h06_ctrl_c_keeps_what_was_tried(
    num_tried: int,
    code: int | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Minutes of trials are not thrown away: figures are printed and written, and the exit code says what happened."""
    real, calls = sweep.run_trial, []

    def interrupted(*arguments: Any) -> sweep.Trial:
        if len(calls) == num_tried:
            raise KeyboardInterrupt
        calls.append(1)
        return real(*arguments)

    monkeypatch.setattr(sweep, "run_trial", interrupted)
    times, out, html = (tmp_path / name for name in ("times.json", "out.json", "out.html"))
    step_times().save(times)
    flags = ["--input-len", "10", "--output-len", "5", "--num-requests", "8", "--rate", "9"]
    flags += ["--simulate", "--no-confirm", "--times", str(times), "--json", str(out), "--html", str(html)]
    found = main(["study", *flags, "--max-num-seqs", "4", "--max-num-batched-tokens", "64,128,256"])
    if code is None:
        assert (found, out.exists()) == (130, False), "nothing was known yet"
        return
    assert found == code
    result = json.loads(out.read_text())
    assert (result["was_interrupted"], len(result["trials"])) == (True, num_tried)
    assert f"Interrupted after {num_tried} settings" in capsys.readouterr().out
    assert "Interrupted after" in html.read_text()


def test_h06_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 s of a machine of two processors, 8 of 20 CPU seconds went to others."""
    readings = iter([(100.0, 1000.0), (112.0, 1020.0), (200.0, 2000.0), (201.0, 2020.0)])
    own = iter([5.0, 9.0, 9.0, 9.5])
    monkeypatch.setattr(load_watch, "machine_cpu_seconds", lambda: next(readings))
    monkeypatch.setattr(load_watch, "_own_cpu_seconds", lambda: next(own))
    (warning,) = load_watch.LoadWatch().warnings()
    assert warning.startswith("the machine was 40% busy with other work; figures include waiting for its CPU")
    assert load_watch.LoadWatch().warnings() == []


@pytest.mark.parametrize("option", ["--json", "--html", "--save-times"])
def test_a_full_disk_does_not_cost_the_figures(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = tmp_path / "times.json"
    step_times().save(times)
    flags = ["--input-len", "10", "--output-len", "5", "--num-requests", "4", "--rate", "9", option, "/dev/full"]
    how = ["--simulate", "--no-confirm", "--times", str(times)]
    assert main(["study", *flags, *how, "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]) == 1
    told = capsys.readouterr()
    assert "No space left on device" in told.err
    assert "4 seqs, 64 tokens" in told.out


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "give --trace FILE, or both --input-len and --output-len"),
        (["--input-len", "10", "--output-len", "5"], "name a --model"),
        (["--input-len", "10"], "give --trace FILE"),
        (["--trace", "absent.csv", "--model", "m"], "absent.csv cannot be read"),
        (["--input-len", "ten", "--output-len", "5", "--model", "m"], "length 'ten' is none of"),
        (["--input-len", "9", "--output-len", "5", "--model", "m", "--rate", "-1"], "--rate is -1"),
        (["--input-len", "9", "--output-len", "5", "--model", "m", "--num-requests", "1"], "--num-requests is 1"),
        (["--input-len", "9", "--output-len", "5", "--model", "m", "--max-num-seqs", "0,4"], "--max-num-seqs must be"),
        (["--input-len", "9", "--output-len", "5", "--html", "absent/a.html"], "there is no folder absent"),
        (["--input-len", "9", "--output-len", "5", "--max-tokens", "4"], "longer than the 4 that clients allow"),
        (["--input-len", "9000", "--output-len", "5"], "of 1000 requests 0 fit into 500 tokens"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    flags: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = tmp_path / "times.json"
    step_times().save(times)
    if "--max-tokens" in flags or "9000" in flags:
        flags = [*flags, "--simulate", "--no-confirm", "--times", str(times)]
    assert main(["study", *flags]) == 1
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.err.strip().splitlines()[-1].startswith("error: ")
