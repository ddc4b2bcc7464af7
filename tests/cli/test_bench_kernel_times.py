"""Kernel times by kind, from made-up events and from a profiled pass: pytest tests/cli/test_bench_kernel_times.py"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

import cb_backend.kernels
from cb_backend.cli.benchmarks import engine, kernel_times
from cb_backend.cli.benchmarks.kernel_times import (
    COPIES,
    MAX_KINDS,
    Event,
    kind_of,
    short_name,
    summarize,
    union_length,
    window_table,
)
from cb_backend.cli.benchmarks.profiled_pass import ProfiledRunner, choose_windows, read_events
from cb_backend.cli.main import main
from cb_backend.study.workloads import Draw, Workload, fixed
from tests.cli.test_bench_command import CONFIG


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(2, 5)], 3),
        ([(0, 4), (10, 11)], 5),
        ([(10, 11), (0, 4)], 5),  # in any order
        ([(0, 4), (4, 6)], 6),  # touching
        ([(0, 4), (3, 6), (5, 9)], 9),  # each overlaps the next
        ([(0, 10), (2, 3), (4, 5)], 10),  # inside another
        ([(0, 10), (2, 3), (8, 12), (20, 21)], 13),
        ([(1, 1)], 0),
    ],
)
def test_time_covered_counts_once(intervals: list[tuple[float, float]], length: float) -> None:
    assert union_length(intervals) == length


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_decode_attention_kernel", "decode attention"),
        ("_plan_kernel", "decode plan"),
        ("_prefill_attention_kernel", "prefill attention"),
        ("_linear_kernel", "products, ours"),
        ("_one_row_kernel", "products, ours"),
        ("_rms_norm_kernel", "norms"),
        ("_choose_kernel", "sampler"),
        ("_commit_tokens_kernel", "step state"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTN", "products, library"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products, library"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816>(Params)", "products, library"),
        ("void gemvNSP_kernel<float, 1>(int)", "products, library"),
        ("void cublasLt::splitKreduce_kernel<32, 16>(x)", "products, library"),
        ("aten::mm", "products, library"),
        ("aten::mm_other", "aten::mm_other"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention, library"),
        ("Memcpy HtoD (Pinned -> Device)", COPIES),
        ("Memset (Device)", COPIES),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>(int)", "indexSelectLargeIndex"),
    ],
)
def test_a_kernel_s_kind_is_told_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_every_kernel_of_ours_has_a_kind() -> None:
    """A new kernel is given a kind when it is written: none of ours is listed under its bare name."""
    folder = Path(next(iter(cb_backend.kernels.__path__)))
    names = re.findall(r"^def (_\w+_kernel)\(", "\n".join(path.read_text() for path in folder.glob("*.py")), re.M)
    assert len(names) > 15
    assert [name for name in names if kind_of(name) == short_name(name)] == []


def test_figures_of_two_steps() -> None:
    """A product of 0 to 40 us, a norm of 30 to 50 that overlaps it, a copy of 60 to 70, a product of 80 to 100."""
    events = [
        Event("nvjet_a", 1000, 1040, 40),
        Event("_rms_norm_kernel", 1030, 1050, 20),
        Event("Memcpy DtoH (Device -> Pinned)", 1060, 1070, 10),
        Event("void cutlass::b<1>()", 1080, 1100, 20),
    ]
    window = summarize(events, 2)
    assert (window["steps"], window["wall_us"], window["sum_us"]) == (2, 100, 90)
    assert (window["busy_us"], window["busy_share"]) == (70, 0.7)  # 1000 to 1050 and 1080 to 1100
    assert window["kinds"] == [
        {"kind": "products, library", "launches_per_step": 1.0, "us_per_step": 30.0, "share": 0.6667},
        {"kind": "norms", "launches_per_step": 0.5, "us_per_step": 10.0, "share": 0.2222},
        {"kind": COPIES, "launches_per_step": 0.5, "us_per_step": 5.0, "share": 0.1111},
    ]
    where = {"is_device": True, "first_step": 5, "pass_steps": 9, "steps_with_prompts": 1}
    title, heading, first, *_, last = window_table({**window, **where}).splitlines()
    assert title == "kernels of steps 5 to 6 of 9, 1 of them with prompts"
    assert heading.split() == ["kind", "a", "step", "us", "a", "step", "us", "each", "share"]
    assert first.split() == ["products,", "library", "1.0", "30.0", "30.00", "66.7%"]
    assert last == "device busy 70.0% of 50.0 us a step under the profiler; sum of all 45.0 us"


def test_many_kinds_end_in_one_line() -> None:
    """25 kinds of 1 to 25 us: the 19 longest, and the six shortest (1 to 6: 21 us) together."""
    window = summarize([Event(f"k{index:02d}", 0, index, index) for index in range(1, 26)], 1)
    assert len(window["kinds"]) == MAX_KINDS
    assert window["kinds"][0]["kind"] == "k25"
    assert window["kinds"][-1] == {
        "kind": "others (6 kinds)", "launches_per_step": 6.0, "us_per_step": 21.0, "share": 0.0646
    }  # fmt: skip
    assert sum(kind["us_per_step"] for kind in window["kinds"]) == window["sum_us"] == 325


def test_a_window_in_which_nothing_was_seen() -> None:
    window = summarize([], 3)
    assert (window["wall_us"], window["busy_share"], window["kinds"]) == (0, None, [])
    where = {"is_device": True, "first_step": 1, "pass_steps": 3, "steps_with_prompts": 0}
    assert window_table({**window, **where}).endswith("0 of them with prompts: the profiler saw none")


def test_windows() -> None:
    assert choose_windows(200, 200) == [range(200)]
    assert choose_windows(201, 200) == [range(100), range(100, 200)]
    assert choose_windows(1060, 200) == [range(100), range(530, 630)]  # 430 before it, 430 after it
    assert choose_windows(5, 1) == [range(1), range(2, 3)]


def profiler_event(name: str, device: DeviceType, start: float, end: float, **more: object) -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end), **more)


def test_what_counts_as_the_device_s_work() -> None:
    """Kernels and copies; neither calls of the host nor its waits nor named ranges, which the device's list has too."""
    cuda, cpu = DeviceType.CUDA, DeviceType.CPU
    events = [
        profiler_event("cudaGraphLaunch", cpu, 0, 9, self_cpu_time_total=9, is_user_annotation=False),
        profiler_event("_linear_kernel", cuda, 2, 6, is_user_annotation=False),
        profiler_event("Memcpy HtoD (Pinned -> Device)", cuda, 1, 2),  # an older torch: no such attribute
        profiler_event("Context Sync", cuda, 0, 90, is_user_annotation=False),
        profiler_event("Stream Wait Event", cuda, 0, 90, is_user_annotation=False),
        profiler_event("ProfilerStep#3", cuda, 0, 90, is_user_annotation=True),
    ]
    assert read_events(events, is_device=True) == [
        Event("_linear_kernel", 2, 6, 4),
        Event("Memcpy HtoD (Pinned -> Device)", 1, 2, 1),
    ]
    assert read_events(events, is_device=False) == [Event("cudaGraphLaunch", 0, 9, 9)]


def test_on_a_device_windows_hold_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched steps are waited for before the profiler starts and before it stops; its events are read afterwards."""
    calls: list[str] = []

    class FakeProfiler:
        def __init__(self, activities: list[torch.profiler.ProfilerActivity]) -> None:
            calls.append(f"new for {activities[0].name}")

        def start(self) -> None:
            calls.append("start")

        def stop(self) -> None:
            calls.append("stop")

        def events(self) -> list[SimpleNamespace]:
            calls.append("events")
            return [profiler_event("_linear_kernel", DeviceType.CUDA, 10, 14)]

    def execute(plan: SimpleNamespace, masks: object) -> None:
        calls.append(f"step {plan.num_rows}")

    for name in ("DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"):
        monkeypatch.setenv(name, "as it was")
    monkeypatch.setattr(torch.profiler, "profile", FakeProfiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    runner = ProfiledRunner(SimpleNamespace(execute=execute), [range(2), range(2, 3), range(4, 9)], True)
    for index in range(6):
        runner.execute(SimpleNamespace(num_rows=index, num_decode_rows=index - (index == 1)), None)
    runner.stop()
    begins = ["wait", "new for CUDA", "start"]
    assert calls == [
        *begins, "step 0", "step 1", "wait", "stop",
        *begins, "step 2", "wait", "stop",
        "step 3",
        *begins, "step 4", "step 5", "wait", "stop",
    ]  # fmt: skip
    figures = [window.figures(runner.num_steps) for window in runner.recorded]
    assert [(one["first_step"], one["steps"], one["steps_with_prompts"]) for one in figures] == [
        (1, 2, 1), (3, 1, 0), (5, 2, 0)
    ]  # fmt: skip
    assert all((one["pass_steps"], one["wall_us"], one["busy_share"]) == (6, 4, 1) for one in figures)


def three_requests(draw: Draw) -> Workload:
    return fixed("W2-128x128", 3, 20, 12, draw)


def test_the_profiled_pass_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three requests of 20 tokens in and 12 out are 12 steps; 6 are recorded: the first three and three of the rest."""
    monkeypatch.setattr(engine, "WORKLOADS", {"W2-128x128": three_requests})
    monkeypatch.setattr(engine, "expand_names", lambda _: ["W2-128x128"])
    monkeypatch.setattr(kernel_times, "MAX_KINDS", 1000)  # each is listed, however long it took
    model, out = tmp_path / "tiny", tmp_path / "out.jsonl"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    flags = ["--model", str(model), "--load-format", "dummy", "--device", "cpu", "--reps", "2", "--run-ahead", "0,2"]
    flags += ["--max-num-seqs", "4", "--engine-args", '{"num_gpu_blocks_override": 200}', "--out", str(out)]
    assert main(["bench", "engine", *flags, "--profile", "6"]) == 0
    _, *records = [json.loads(line) for line in out.read_text().splitlines()]
    names = [(record["workload"], record["setting"]) for record in records]
    assert names == [
        (name, setting) for setting in ("ahead=0", "ahead=2") for name in ("W2-128x128", "W2-128x128", "profile")
    ]
    assert [record["recomputed_tokens"] for record in records if record["workload"] != "profile"] == [0] * 4
    for record in records[2::3]:
        assert (record["of"], record["max_num_seqs"]) == ("W2-128x128", 4)
        first, second = record["windows"]
        assert (first["first_step"], first["steps"], first["steps_with_prompts"]) == (1, 3, 1)
        assert (second["first_step"], second["steps"], second["steps_with_prompts"]) == (7, 3, 0)
        for window in (first, second):
            assert (window["pass_steps"], window["is_device"]) == (12, False)
            assert 0 < window["busy_share"] <= 1
            kinds = {kind["kind"]: kind for kind in window["kinds"]}
            # A layer has four products or more, and the head is one; every step has them.
            assert kinds["products, library"]["launches_per_step"] >= 5
            assert sum(kind["share"] for kind in window["kinds"]) == pytest.approx(1, abs=0.01)
            # On one thread operators do not overlap, and their own times add up to what they cover.
            assert window["sum_us"] == pytest.approx(window["busy_us"], rel=0.05)
    text = capsys.readouterr().out
    assert text.count("operators on the CPU of steps 1 to 3 of 12, 1 of them with prompts") == 2
    assert text.count("operators on the CPU of steps 7 to 9 of 12, 0 of them with prompts") == 2
