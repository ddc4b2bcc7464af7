"""`cb-backend study` from the command line, on a tiny real engine: pytest tests/study/test_study_command.py"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from cb_backend.cli.main import main
from cb_backend.cli.study_session import Session
from cb_backend.study import load_watch, sweep
from cb_backend.study.advice import Study
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


# ---- several GPUs --------------------------------------------------------------------------------------------------


def study_ways(
    tiny: list[str], tmp_path: Path, *more: str, blocks: bool = False, **changes: Any
) -> tuple[int, dict[str, Any]]:
    """Simulated with made-up step times, whose cache is not what `tiny` says but what they say."""
    times, out = tmp_path / "times.json", tmp_path / "out.json"
    step_times(**{"device": "cuda", **changes}).save(times)
    arguments = json.loads(tiny[3])
    if not blocks:
        del arguments["num_gpu_blocks_override"]
    flags = ["--input-len", "20", "--output-len", "10", "--num-requests", "24", "--json", str(out), *more]
    how = ["--simulate", "--no-confirm", "--times", str(times), *tiny[:2], "--engine-args", json.dumps(arguments)]
    code = main(["study", *flags, *how, "--max-num-seqs", "4", "--max-num-batched-tokens", "64"])
    return code, json.loads(out.read_text())


def test_of_several_gpus_the_plan_comes_first_and_every_way_is_tried(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = study_ways(tiny, tmp_path, "--gpus", "2", "--rate", "20")
    assert code == 0
    text = capsys.readouterr().out
    planned, tried = text.index("on up to 2 of h200: prompts of 20 tokens"), text.index("The ways that were tried:")
    assert planned < tried < text.index("Settings tried")
    alone, together = result["ways"]
    sizes = [(way["tensor_parallel_size"], way["data_parallel_size"]) for way in (alone, together)]
    assert sizes == [(1, 2), (2, 1)]
    assert [way["step_times"] for way in (alone, together)] == ["measured", "reckoned"]
    assert [way["rate"] for way in (alone, together)] == [20.0, 20.0], "the same load, shared out"
    # A step of so tiny a model does not become shorter by sharing it, so two engines do about twice as much.
    assert alone["output_tokens_per_s"] == pytest.approx(2 * alone["at_once"]["output_tokens_per_s"])
    assert alone["output_tokens_per_s"] > 1.5 * together["output_tokens_per_s"]
    assert (alone["is_chosen"], together["is_chosen"]) == (True, False)
    assert (result["rate"], result["requests"]) == (10.0, 12), "of one of the two engines"
    wanted = {"tensor_parallel_size": 1, "data_parallel_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    assert result["recommended"] == wanted
    assert f"  {json.dumps(wanted)}\n" in text


@pytest.mark.parametrize("broken", [1, 2])
def test_a_way_that_cannot_be_studied_leaves_the_others(
    broken: int, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, held = Session.run, []

    def fail(session: Session) -> Study:
        if session.config.tensor_parallel_size == broken:
            memory = {"of a device"}
            held.append(weakref.ref(memory))
            try:
                raise OSError("no answer")
            except OSError as error:
                raise RuntimeError("rank 1 has ended") from error
        assert not any(memory() for memory in held), "an engine that failed holds nothing while the next one starts"
        return run(session)

    monkeypatch.setattr(Session, "run", fail)
    code, result = study_ways(tiny, tmp_path, "--gpus", "2", "--rate", "20")
    assert code == 0
    assert [way["tensor_parallel_size"] for way in result["ways"]] == [3 - broken]
    printed = capsys.readouterr()
    assert f"tensor_parallel_size {broken} could not be studied: rank 1 has ended" in printed.out + printed.err
    assert f"tensor_parallel_size {broken} could not be studied (why: above)" in printed.out


def test_a_rate_that_is_found_is_the_same_for_every_way(tiny: list[str], tmp_path: Path) -> None:
    _, result = study_ways(tiny, tmp_path, "--gpus", "2")
    rates = [way["rate"] for way in result["ways"]]
    assert rates[0] == pytest.approx(rates[1])


def test_without_gpus_a_study_is_as_it_was(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, result = study_ways(tiny, tmp_path, "--rate", "20")
    assert "ways" not in result
    assert set(result["recommended"]) == {"max_num_seqs", "max_num_batched_tokens"}
    assert "Ways to spread" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--card", "h100"], "--card says what --gpus are"),
        (["--gpus", "2", "--card", "abacus"], "--card is 'abacus'; use one of"),
        (["--gpus", "2", "--cpu-time"], "--cpu-time is for one device"),
        (["--gpus", "2", "--engine-args", '{"model": "x", "tensor_parallel_size": 2}'], "is what --gpus tries"),
        (["--gpus", "2"], "--gpus needs a --model"),
    ],
)
def test_wrong_usage_of_gpus_is_told(
    flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = tmp_path / "times.json"
    step_times().save(times)
    how = ["--simulate", "--no-confirm", "--times", str(times), "--input-len", "5", "--output-len", "5"]
    assert main(["study", *how, *flags]) == 1
    assert told in capsys.readouterr().err


def test_times_of_more_gpus_than_there_are_are_refused(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = tmp_path / "times.json"
    step_times(device="cuda", tensor_parallel_size=4).save(times)
    flags = ["--input-len", "5", "--output-len", "5", "--simulate", "--no-confirm", "--times", str(times), *tiny]
    assert main(["study", *flags, "--gpus", "2"]) == 1
    assert "the step times are of tensor_parallel_size 4: that is more than there are" in capsys.readouterr().err
