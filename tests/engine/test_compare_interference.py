"""kernels/compare_interference.py: which gaps count, and when the driver sends and stops. No engine."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cb_backend.cli.paths import checkout_path
from cb_backend.study.workloads import Workload
from tests.models.tiny_checkpoints import write_checkpoint

LONG = 8192


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "compare_interference", checkout_path("kernels/compare_interference.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def workload(prompt_lens: list[int], output_lens: list[int], arrivals: list[float]) -> Workload:
    return Workload("W", [np.zeros(length, np.int32) for length in prompt_lens], output_lens, arrivals)


def test_only_gaps_of_others_beside_an_unanswered_long_prompt_count(script: ModuleType) -> None:
    work = workload([8, LONG], [9, 2], [0.0, 1.0])
    stream = [(moment, 0, 1) for moment in (0.1, 0.5, 0.9, 1.4, 1.5, 1.6, 3.0)]
    prompt = [(1.45, 1, 1), (2.9, 1, 1)]  # its own gap of 1.45 s is no stream's wait for another
    found = script.figures(work, sorted(stream + prompt))
    assert found["num_gaps"] == 2  # 0.9 to 1.4 and 1.4 to 1.5; the gap of 1.4 s comes after the answer
    assert found["itl_max_ms"] == pytest.approx(500)
    assert found["ttft_long_p50_ms"] == pytest.approx(450)


def test_no_stream_beside_the_prompt_is_no_figure(script: ModuleType) -> None:
    work = workload([8, LONG], [2, 1], [0.0, 1.0])
    with pytest.raises(ValueError, match="no stream was running"):
        script.figures(work, [(0.1, 0, 1), (0.2, 0, 1), (1.5, 1, 1)])


def test_driver_sends_in_time_and_stops_after_the_long_prompts(script: ModuleType) -> None:
    work = workload([8, LONG], [1000, 3], [0.0, 0.02])
    running: list[int] = []

    def step() -> list[tuple[int, int]]:
        return [(index, 1) for index in running]

    events = script.drive(work, running.append, step, lambda: not running)
    assert sum(count for _, index, count in events if index == 1) == 3
    assert 3 <= sum(count for _, index, count in events if index == 0) < 1000 * 1000
    assert min(moment for moment, index, _ in events if index == 1) >= 0.02
    assert events[-1][1] == 1


@pytest.mark.parametrize(
    ("cards", "digest", "end"),
    [
        ({"ours": "H100, GPU-1", "vllm": "H100, GPU-1"}, "aa", "0.50x"),
        ({"ours": "H100, GPU-1", "vllm": "H200, GPU-2"}, "aa", "no ratio: card differs: H100, GPU-1, H200, GPU-2"),
        ({"ours": "H100, GPU-1", "vllm": "H100, GPU-1"}, "bb", "no ratio: digest differs: aa, bb"),
        ({"ours": None, "vllm": None}, "aa", "no ratio: card is not known of every run"),
        ({"ours": "H100, GPU-1", "vllm": None}, "aa", "no ratio: card is not known of every run"),
    ],
)
def test_no_ratio_between_other_or_unknown_cards_or_lengths(
    script: ModuleType, cards: dict[str, str], digest: str, end: str
) -> None:
    names = ("itl_p50_ms", "itl_p99_ms", "itl_max_ms", "ttft_long_p50_ms", "ttft_long_max_ms")
    ours, theirs = ({**dict.fromkeys(names, ms), "digest": "aa"} for ms in (20.0, 40.0))
    line = script.row("W8", "ours defaults", [ours, ours], [theirs, {**theirs, "digest": digest}], cards)
    assert line.endswith(end)
    assert script.row("W8", "vllm defaults", [theirs], [], cards).split() == ["W8", "vllm", "defaults", *["40.0"] * 5]


def test_our_arm_runs_on_a_small_model(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arm as the script starts it, with shorter prompts: the engine's interface is the one that it expects."""
    small = workload([8, 8, 96], [40, 40, 1], [0.0, 0.0, 0.01])
    monkeypatch.setattr(script, "LONG_PROMPT", 64)
    monkeypatch.setattr(script, "workloads", lambda vocab_size, repetition: [small])
    out = tmp_path / "ours.jsonl"
    engine = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 64}
    arguments = ["--arm", "ours", "--model", str(write_checkpoint("llama-gqa", tmp_path)), "--out", str(out)]
    arguments += ["--reps", "1", "--dtype", "float32", "--max-model-len", "128", "--our-args", json.dumps(engine)]
    monkeypatch.setattr(sys, "argv", ["compare_interference.py", *arguments])
    assert script.main() == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["setting"] for record in records] == ["defaults", "max_itl_ms 15"]
    assert all(0 < record["itl_p50_ms"] <= record["itl_p99_ms"] <= record["itl_max_ms"] for record in records)
