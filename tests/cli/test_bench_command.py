"""`cb-backend bench engine` from the command line, on the real engine with random weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cb_backend.cli.benchmarks import engine
from cb_backend.cli.main import main
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.study.timed_pass import PassResult
from cb_backend.study.workloads import WORKLOADS, Draw, Workload

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def test_records_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two requests of workload c (383 + 436 prompt tokens, 290 + 295 output tokens) at two batch sizes."""
    model, out = tmp_path / "tiny", tmp_path / "out.jsonl"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    flags = ["--model", str(model), "--load-format", "dummy", "--device", "cpu", "--workload", "c", "--reps", "1"]
    flags += ["--scale", "0.002", "--max-num-seqs", "1,4", "--run-ahead", "0", "--out", str(out)]
    flags += ["--engine-args", '{"num_gpu_blocks_override": 200}']
    assert main(["bench", "engine", *flags]) == 0
    start_up, alone, together = [json.loads(line) for line in out.read_text().splitlines()]
    stages = {name: value for name, value in start_up.items() if name.endswith("_s")}
    total = stages.pop("total_s")
    assert total == pytest.approx(sum(stages.values()), abs=0.01)
    assert {"config_s", "engine_s", "first_token_s"} <= set(stages)
    for record in (alone, together):
        assert (record["prompt_tokens"], record["output_tokens"]) == (819, 585)
        assert (record["dtype"], record["num_blocks"], record["temperature"]) == ("float32", 200, 0.6)
        assert 0 < record["limit"]["fraction_executed"] < 1
    assert (alone["max_num_seqs"], together["max_num_seqs"]) == (1, 4)
    # One after the other: a step for each output token. Together: the second joins with the first's chunk.
    assert alone["steps"] == 585
    assert alone["batch_histogram"] == {"1": 585}
    assert together["steps"] == 295
    assert together["batch_histogram"] == {"1": 5, "2": 290}
    *_, first, second, legend = capsys.readouterr().out.splitlines()
    assert first.startswith("c seqs=1 ahead=0 ")
    assert second.startswith("c seqs=4 ahead=0 ")
    assert legend.startswith("times in ms")


def shortened(make: Callable[[Draw], Workload]) -> Callable[[Draw], Workload]:
    """The first three requests of a workload, cut short; the last of them arrives with the last of all."""

    def make_short(draw: Draw) -> Workload:
        whole = make(draw)
        short = whole.first(3)
        return dataclasses.replace(
            short,
            prompts=[prompt[:40] for prompt in short.prompts],
            output_lens=[min(length, 3) for length in short.output_lens],
            arrivals=[*short.arrivals[:-1], min(whole.arrivals[-1], 0.2)],
            num_shared_tokens=None if short.num_shared_tokens is None else [0, 0, 8],
        )

    return make_short


def test_every_workload_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """W1 to W8 and the long ones, W3 and W4 at several rates: each has its record, with both limits and host time."""
    monkeypatch.setattr(engine, "WORKLOADS", {name: shortened(make) for name, make in WORKLOADS.items()})
    model, out, trace = tmp_path / "tiny", tmp_path / "out.jsonl", tmp_path / "trace.csv"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    rows = [f"2023-11-16 18:15:46.{second}00,{30 + second},{3 + second}" for second in range(3)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    flags = ["--model", str(model), "--load-format", "dummy", "--device", "cpu", "--reps", "1", "--trace", str(trace)]
    flags += ["--workload", "W1,W2,W3,W4,W5,W6,W7,W8,long,c", "--rate", "inf,50%", "--max-num-seqs", "4"]
    flags += ["--engine-args", '{"num_gpu_blocks_override": 200}', "--out", str(out)]
    assert main(["bench", "engine", *flags]) == 0
    _, *records = [json.loads(line) for line in out.read_text().splitlines()]
    names = [(record["workload"], record["setting"]) for record in records]
    rates = dict.fromkeys(("W3", "W4"), ("rate=inf", "rate=50%"))
    assert sorted(names) == sorted((name, rate) for name in WORKLOADS for rate in rates.get(name, ("",)))
    for record in records:
        assert record["output_tokens"] == 3 * record["requests"]
        assert 0 <= record["limit"]["fraction_executed"] < 1
        is_timed = record["workload"] in ("W4", "W8") or record["setting"] == "rate=50%"
        assert ("fraction_ideal" in record["limit"]) != is_timed  # there the arrivals decide
        assert all(kind["host_us"] > 0 for kind in record["step_kinds"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-1 - len(records) : -1]] == [name for name, _ in names]


def test_what_cannot_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--model", "nowhere", "--workload", "W12"]) == 1
    assert capsys.readouterr().err.startswith("error: workload 'W12' is not known")


@pytest.mark.long
def test_requests_go_through_adapters_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None, two and three; the engine has places for three."""
    model, out = tmp_path / "tiny", tmp_path / "out.jsonl"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    flags = ["--model", str(model), "--load-format", "dummy", "--device", "cpu", "--workload", "c", "--reps", "1"]
    flags += ["--scale", "0.004", "--max-num-seqs", "4", "--adapters", "0,2,3", "--out", str(out)]
    flags += ["--engine-args", '{"num_gpu_blocks_override": 200, "max_lora_rank": 8}', "--profile", "2"]
    seen: list[tuple[int, ...]] = []
    run_pass = engine.run_pass

    def seeing(fresh: LLMEngine, *args: Any) -> PassResult:
        result = run_pass(fresh, *args)
        stats = fresh.stats().adapters
        assert stats is not None
        seen.append((stats.num_loads, stats.num_resident))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "run_pass", seeing)
        assert main(["bench", "engine", *flags]) == 0
    assert seen == [(0, 0)] + 2 * [(0, 0), (2, 2), (3, 3)], "the first token, then warm-ups and passes"
    start_up, *records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(each["adapters"], each["setting"]) for each in records[::2]] == [
        (number, f"adapters={number}") for number in (0, 2, 3)
    ]
    assert [each["requests"] for each in records[::2]] == [4, 4, 4]
    assert [each["windows"][0]["pass_steps"] for each in records[1::2]] == [each["steps"] for each in records[::2]]
    # A and B of q, k, v, o, gate, up and down in float32, of rank 8 filled up to 16; and their scales.
    assert 16_384 < start_up["adapter_bytes"] < 20_000
    assert start_up["adapter_read_ms"] > 0 < start_up["adapter_load_ms"]
    assert "3 adapters of 0.0" in capsys.readouterr().out


def test_adapters_that_the_model_has_no_place_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    flags = ["--model", str(model), "--load-format", "dummy", "--device", "cpu", "--adapters", "2"]
    assert main(["bench", "engine", *flags, "--engine-args", '{"max_cpu_loras": 1}']) == 1
    assert "max_cpu_loras is 1, below max_loras (2)" in capsys.readouterr().err
    assert main(["bench", "engine", *flags[:-1], "2,-1"]) == 1
    assert "-1 adapters cannot be tried" in capsys.readouterr().err
