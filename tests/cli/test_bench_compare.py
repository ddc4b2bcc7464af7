"""No ratio between unlike runs, ties inside the spread, budgets: pytest tests/cli/test_bench_compare.py"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cb_backend.cli.benchmarks.compare import (
    SAME_WORK,
    ArmCost,
    Spread,
    affordable_repetitions,
    peer_records,
    ratio,
    refusal,
    spread,
    table,
)
from tests.server.conftest import MARK, marked_processes
from tests.waiting import eventually

RUN = {
    "workload": "W1",
    "card": "H100, GPU-1",
    "config_digest": "aa",
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "temperature": 0.6,
    "requests": 256,
    "prompt_tokens": 142827,
    "output_tokens": 133966,
    "lengths_digest": "ll",
}


def record(**changes: Any) -> dict[str, Any]:
    return {**RUN, "output_tok_s": 20_000.0, **changes}


def test_equal_conditions_are_comparable() -> None:
    assert refusal([record(), record()], [record()], SAME_WORK) is None


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("card", "H200, GPU-2"),
        ("config_digest", "bb"),
        ("dtype", "float16"),
        ("max_model_len", 8192),
        ("temperature", 0.0),
        ("requests", 255),
        ("prompt_tokens", 142826),
        ("output_tokens", 133967),
        ("lengths_digest", "mm"),
    ],
)
def test_each_condition_refuses(name: str, other: object) -> None:
    assert (refusal([record()], [record(**{name: other})], SAME_WORK) or "").startswith(f"{name} differs: ")
    assert refusal([record()], [record(**{name: None})], SAME_WORK) == f"{name} is not known of every run"
    # Also when only one of our own repetitions differs.
    assert refusal([record(), record(**{name: other})], [record()], SAME_WORK) is not None
    text = "\n".join(table("model", [record()], [record(**{name: other})]))
    assert f"no ratio: {name} differs" in text
    assert "1.00x" not in text


def test_spread_pools_numbers_and_summaries() -> None:
    assert spread([{"x": 3.0}, {"x": 1.0}, {"x": 2.0}, {"y": 9.0}], "x") == Spread(2.0, 1.0, 3.0)
    summaries = [{"x": {"p50": 2.0, "min": 1.5, "max": 4.0}}, {"x": {"p50": 3.0, "min": 1.0, "max": 3.5}}]
    assert spread(summaries, "x") == Spread(2.5, 1.0, 4.0)
    assert spread([{"y": 1.0}], "x") is None


def test_ratio_is_above_one_when_ours_is_better() -> None:
    assert ratio(Spread(30.0, 30, 30), Spread(20.0, 20, 20), True) == 1.5
    assert ratio(Spread(1.0, 1, 1), Spread(2.0, 2, 2), False) == 2.0


def test_table_gives_ratio_tie_and_limit() -> None:
    ours = [record(output_tok_s=30_000.0, limit={"output_tok_s": 52_634.0, "bandwidth": 3e12, "flops": 7.9e14})]
    theirs = [record(output_tok_s=20_000.0, version="0.26.0"), record(output_tok_s=20_500.0, version="0.26.0")]
    text = "\n".join(table("llama", ours, theirs))
    assert "vLLM 0.26.0" in text
    assert "52,634" in text
    assert "measured 3 TB/s, 790 TFLOP/s" in text
    assert text.endswith("1.48x")  # 30,000 / 20,250
    ours.append(record(output_tok_s=20_400.0))
    assert table("llama", ours, theirs)[-1].endswith("a tie (1.24x, inside the spread)")


def test_a_missing_arm_has_no_ratio() -> None:
    assert table("llama", [record()], [])[-1].endswith("no ratio: vLLM has no figure")
    assert table("llama", [], [record()])[-1].endswith("no ratio: ours has no figure")


def test_peer_lines_are_brought_into_our_form() -> None:
    lines = [
        {"workload": "startup", "import_s": 20.5, "engine_init_s": 50.0},
        {
            "workload": "b_latency1",
            "prompt_tokens": 128,
            "output_tokens": 256,
            "ttft_ms": 10.0,
            "tpot_ms": 2.0,
            "seconds_min": 0.469,
            "seconds_max": 0.571,
        },
    ]
    start_up, latency = peer_records(lines, {"b": "bb"}, {"card": "H100"})
    assert (start_up["total_s"], start_up["card"]) == (70.5, "H100")
    assert (latency["workload"], latency["lengths_digest"]) == ("b", "bb")
    assert latency["tpot_ms"] == {"p50": 2.0, "min": pytest.approx(1.8), "max": pytest.approx(2.2)}


def test_budget_drops_repetitions_then_arms() -> None:
    costs = [ArmCost(30, 20), ArmCost(100, 20), ArmCost(30, 20)]
    assert affordable_repetitions(costs, math.inf, 3) == 3
    assert affordable_repetitions(costs, 340, 3) == 3
    assert affordable_repetitions(costs, 339, 3) == 2  # 160 + 60 r <= 339
    assert affordable_repetitions(costs, 219, 3) == 1  # not all three, but the first one fits
    assert affordable_repetitions(costs, 49, 3) == 0


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "kernels" / "compare_vllm.py"
    spec = importlib.util.spec_from_file_location("compare_vllm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_vllm"] = module
    spec.loader.exec_module(module)
    return module


def test_a_failing_process_is_one_line(script: ModuleType, tmp_path: Path) -> None:
    def run(code: str, timeout: float = 60) -> str | None:
        result: str | None = script.run_process(
            [sys.executable, "-c", code], dict(os.environ), tmp_path / "log", timeout
        )
        return result

    assert run("print('fine')") is None
    assert (tmp_path / "log").read_text() == "fine\n"
    assert run("print('a'); raise SystemExit('no GPU here')") == "exit code 1: no GPU here"
    assert script.run_process(["/no/such"], {}, tmp_path / "log", 9) == "cannot be started: No such file or directory"


def test_a_process_and_its_children_end_with_the_budget(script: ModuleType, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)']);"
        "time.sleep(3600)"
    )
    mark = uuid.uuid4().hex
    problem = script.run_process([sys.executable, "-c", code], {**os.environ, MARK: mark}, tmp_path / "log", 3.0)
    assert problem == "ended after 3 s: the budget is used up"
    eventually(lambda: marked_processes(mark) == [], "neither is left")


KIT_SCRIPT = """
import argparse, json

def lens_a():
    return [[1, 2, 3], [4]], [5, 6]

def lens_c():
    return [7], [8]

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("config", "workloads", "reps", "dtype", "max-model-len", "temperature", "out"):
        parser.add_argument("--" + name)
    args = parser.parse_args()
    base = {"version": "9.9", "dtype": args.dtype}
    with open(args.out, "w") as file:
        for line in (
            {"workload": "startup", "import_s": 1, "engine_init_s": 2},
            {"workload": "a_nano256", "requests": 2, "prompt_tokens": 4, "output_tokens": 11, "output_tok_s": 50.0},
        ):
            file.write(json.dumps({**base, **line}) + "\\n")
        file.write('{"workload": "cut o')
"""


def test_one_failing_arm_does_not_stop_the_other(script: ModuleType, tmp_path: Path, capsys: Any) -> None:
    """The kit's arm brings records; ours is told to run with a flag that does not exist."""
    kit = tmp_path / "kit"
    (kit / "configs" / "tiny").mkdir(parents=True)
    (kit / "site" / "vllm").mkdir(parents=True)
    (kit / "configs" / "tiny" / "config.json").write_text(
        '{"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8}'
    )
    (kit / "env.sh").write_text(f"export VLLM_SITE={kit}/site\n")
    (kit / "bench_vllm.py").write_text(KIT_SCRIPT)
    flags = ["--vllm-kit", str(kit), "--models", "tiny", "--out", str(tmp_path / "out"), "--our-args=--no-such-flag"]
    assert script.Comparison(script.parse_arguments(flags)).run() == 1
    text = (tmp_path / "out" / "compare.txt").read_text()
    assert text in capsys.readouterr().out
    assert "problem: tiny-ours-0: exit code 2: cb-backend bench: error: unrecognized arguments: --no-such-flag" in text
    assert "vLLM 9.9" in text
    lines = script.read_lines(tmp_path / "out" / "compare.jsonl")
    assert [(line["arm"], line["workload"]) for line in lines] == [("tiny-vllm-0", "startup"), ("tiny-vllm-0", "W1")]
    offline = next(line for line in text.splitlines() if line.startswith("offline a"))
    assert "50.00" in offline
    assert offline.endswith("no ratio: ours has no figure")
