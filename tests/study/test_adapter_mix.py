"""Adapters in the simulator, against times worked out by hand: pytest tests/study/test_adapter_mix.py"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cb_backend.cli.main import main
from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.study.adapter_mix import AdapterMix
from cb_backend.study.bench import Setting, SimulatedBench
from cb_backend.study.figures import figures
from cb_backend.study.replay import Replay, replay
from cb_backend.study.simulator import VirtualClock, simulated_engine
from cb_backend.study.static_admission import StaticAdmission
from cb_backend.study.traffic import Traffic
from tests.study.made_up import ROW_S, STEP_S, TOKEN_S, config, mixed_traffic, step_times, traffic

LOAD_S = 0.25


def mix(num_slots: int, num_names: int = 6, skew: float = 1.0) -> AdapterMix:
    return AdapterMix(num_names, skew, num_slots, LOAD_S * 8e9, 8e9)


def simulate(load: Traffic, adapters: list[bytes], num_slots: int, **arguments: Any) -> Replay:
    clock = VirtualClock()
    settings = config(**{"enable_lora": True, "max_loras": num_slots, **arguments})
    engine = simulated_engine(settings, step_times(), clock, adapters=mix(num_slots))
    result = replay(engine, load, clock, clock.sleep, adapters=adapters)
    engine.scheduler.check_integrity()
    return result


def test_two_adapters_take_turns_in_one_slot() -> None:
    """10 prompt tokens and five answers each: the second begins when the first has ended, with a load of its own."""
    result = simulate(traffic([10, 10], [5, 5]), [b"a", b"b"], 1)
    first = LOAD_S + STEP_S + 10 * TOKEN_S
    alone = first + 4 * (STEP_S + ROW_S)
    assert result.latencies.ttft.tolist() == pytest.approx([first, alone + first])
    assert result.latencies.e2e.tolist() == pytest.approx([alone, 2 * alone])
    assert result.num_adapter_loads == 2
    found = figures(result)
    assert found.num_adapter_loads == 2
    assert found.mean_waiting == pytest.approx((result.steps.num_waiting * result.steps.seconds).sum() / (2 * alone))
    assert 0.4 < found.mean_waiting <= 0.5, "one of two waits for half of the time"


def test_two_slots_load_both_in_one_step() -> None:
    result = simulate(traffic([10, 10], [5, 5]), [b"a", b"b"], 2)
    first = 2 * LOAD_S + STEP_S + 20 * TOKEN_S
    assert result.latencies.ttft.tolist() == pytest.approx([first, first])
    assert result.seconds == pytest.approx(first + 4 * (STEP_S + 2 * ROW_S))
    assert result.num_adapter_loads == 2


def test_one_adapter_is_loaded_once_and_stays() -> None:
    result = simulate(traffic([10, 10], [2, 2], [0.0, 50.0]), [b"a", b"a"], 1)
    assert result.num_adapter_loads == 1
    assert result.latencies.ttft.tolist() == pytest.approx([LOAD_S + STEP_S + 10 * TOKEN_S, STEP_S + 10 * TOKEN_S])


def test_without_adapters_nothing_is_loaded() -> None:
    result = simulate(traffic([10], [5]), [], 1)
    assert result.num_adapter_loads == 0
    assert result.seconds == pytest.approx(STEP_S + 10 * TOKEN_S + 4 * (STEP_S + ROW_S))


@pytest.mark.parametrize(("adapters", "num_cached"), [([b"a", b"a"], 16), ([b"a", b"b"], 0)])
def test_prefixes_are_shared_within_an_adapter_only(adapters: list[bytes], num_cached: int) -> None:
    load = traffic([17, 17], [2, 2], [0.0, 5.0])
    load = Traffic([load.prompts[0]] * 2, load.output_lens, load.max_tokens, load.arrivals)
    assert simulate(load, adapters, 2, enable_prefix_caching=True).num_cached_prompt_tokens == num_cached


@pytest.mark.parametrize("policy", [ContinuousAdmission, StaticAdmission])
@pytest.mark.parametrize("run_ahead", [0, 3])
def test_fewer_slots_than_names_cost_loads_and_time(policy: PolicyKind, run_ahead: int) -> None:
    """Not always waiting: in the mean, who need not wait gain what others lose."""
    loads, seconds, waits = [], [], []
    for num_slots in (1, 2, 6):
        settings = config(enable_lora=True, max_loras=num_slots, run_ahead=run_ahead)
        bench = SimulatedBench(settings, step_times(), mix(num_slots))
        result = bench.run(mixed_traffic(60), Setting(8, 64), policy)  # raises for tokens that are missing
        loads.append(result.num_adapter_loads)
        seconds.append(result.seconds)
        waits.append(float(result.latencies.ttft.mean()))
    assert min(loads[:2]) > loads[2] == 6, "who shares an adapter goes together, so one slot may load less than two"
    assert seconds[0] > seconds[1] > seconds[2]
    assert waits[0] > max(waits[1:])


def test_names_are_drawn_by_zipfs_law() -> None:
    drawn = mix(1, num_names=4).draw(50_000)
    shares = [count / 50_000 for _, count in sorted(Counter(drawn).items())]
    total = 1 + 1 / 2 + 1 / 3 + 1 / 4
    assert shares == pytest.approx([1 / total, 1 / 2 / total, 1 / 3 / total, 1 / 4 / total], abs=0.01)
    assert [Counter(mix(1, 4, skew=0.0).draw(50_000))[key] / 50_000 for key in set(drawn)] == pytest.approx(
        [0.25] * 4, abs=0.01
    )
    assert mix(1).draw(10) == mix(1).draw(30)[:10], "the first requests of some traffic keep their adapters"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_names": 0}, "0 adapters in 2 slots"),
        ({"num_slots": 0}, "3 adapters in 0 slots"),
        ({"skew": -1.0}, "a skew of -1"),
        ({"skew": float("nan")}, "a skew of nan"),
        ({"bytes_per_s": 0.0}, "at 0 bytes/s"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    usual = {"num_names": 3, "skew": 1.0, "num_slots": 2, "num_bytes": 1e6, "bytes_per_s": 1e9}
    with pytest.raises(ConfigError, match=words):
        AdapterMix(**{**usual, **changes})


def test_an_engine_that_takes_no_adapters_is_refused() -> None:
    with pytest.raises(ConfigError, match="enable_lora"):
        simulated_engine(config(), step_times(), VirtualClock(), adapters=mix(1))


def study(tmp_path: Path, *flags: str) -> int:
    step_times().save(tmp_path / "times.json")
    traffic_flags = ["--input-len", "uniform:10:50", "--output-len", "20", "--num-requests", "40", "--rate", "3"]
    grid = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--simulate", "--times"]
    return main(["study", *traffic_flags, *grid, str(tmp_path / "times.json"), *flags])


def test_study_reports_loads_and_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, html = tmp_path / "out.json", tmp_path / "out.html"
    lora = ["--adapters", "6", "--adapter-mib", "477", "--adapter-gb-s", "2", "--adapter-skew", "0.5"]
    arguments = ["--engine-args", '{"enable_lora": true, "max_loras": 2}', "--json", str(out), "--html", str(html)]
    assert study(tmp_path, "--no-confirm", *lora, *arguments) == 0
    printed = capsys.readouterr().out
    words = "6 adapters, drawn by Zipf's law of exponent 0.5, over 2 slots (max_loras); a load takes 250 ms"
    assert words in printed
    assert "<h2>Adapters</h2>" in html.read_text()
    found = json.loads(out.read_text())["adapters"]
    assert (found["names"], found["max_loras"], found["load_ms"]) == (6, 2, pytest.approx(250, rel=0.01))
    loaded, plain = (found[side]["at_load"] for side in ("with", "without"))
    assert loaded["num_adapter_loads"] >= 6
    assert plain["num_adapter_loads"] == 0
    assert loaded["mean_waiting"] > plain["mean_waiting"]
    assert loaded["ttft_ms"]["p99"] > plain["ttft_ms"]["p99"] + 250
    row = next(line for line in printed.splitlines() if line.startswith("adapters loaded"))
    assert row.split()[-2:] == [str(loaded["num_adapter_loads"]), "0"]
    assert "the adapters' own arithmetic is not in the step times" in printed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--adapters", "3", "--adapter-mib", "50"], "add --simulate and --no-confirm"),
        (["--adapters", "3", "--no-confirm"], "needs --adapter-mib"),
        (["--adapters", "3", "--no-confirm", "--adapter-mib", "50"], '"enable_lora": true'),
        (["--adapters", "3", "--no-confirm", "--adapter-mib", "50", "--adapter-skew", "-2",
          "--engine-args", '{"enable_lora": true}'], "skew of -2"),
    ],
)  # fmt: skip
def test_study_says_what_is_missing(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study(tmp_path, *flags) == 1
    assert words in capsys.readouterr().err


def test_study_without_adapters_says_nothing_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study(tmp_path, "--no-confirm", "--json", str(tmp_path / "out.json")) == 0
    assert json.loads((tmp_path / "out.json").read_text())["adapters"] is None
    assert "adapter" not in capsys.readouterr().out
