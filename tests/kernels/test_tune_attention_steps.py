"""kernels/tune_attention_steps.py against made-up times: what it searches and reaches, what becomes an entry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cb_backend.cli.paths import checkout_path
from cb_backend.kernels import launch

CPU = torch.device("cpu")
FIRST = {"block_n": 128, "num_warps": 4, "num_stages": 3, "ctas_per_sm": 2, "min_split": 128}


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import tune
    import tune_attention_steps

    monkeypatch.setattr(tune_attention_steps, "launch_parameters", lambda op, device, **when: FIRST)
    return SimpleNamespace(tune=tune, steps=tune_attention_steps)


class MadeUpSteps:
    """Steps that are the parameters which plan and kernel would be launched with; their time is a function of those."""

    time: Callable[[dict[str, int]], float]

    def __init__(self, models: list[Any], num_rows: int) -> None:
        self.num_rows = num_rows
        self.is_closed = False

    def compile(self, many: list[Any]) -> None: ...

    def make(self, settings: dict[Any, dict[str, int]]) -> dict[str, int]:
        from captured_steps import using

        with using(settings):
            found = launch.launch_parameters("decode_attention", CPU, block_d=128, kv_bytes=2, m=self.num_rows)
            other = launch.launch_parameters("decode_attention", CPU, block_d=128, kv_bytes=2, m=2 * self.num_rows)
        assert [found] == list(settings.values())
        assert other == launch.launch_parameters("decode_attention", CPU, block_d=128, kv_bytes=2, m=1)
        return found

    def milliseconds(self, step: dict[str, int]) -> float:
        return type(self).time(step)

    def close(self) -> None:
        self.is_closed = True


def steps_of(time: Callable[[dict[str, int]], float]) -> type[MadeUpSteps]:
    return type("Steps", (MadeUpSteps,), {"time": staticmethod(time)})


def test_finds_a_tile_and_cut_that_need_each_other(workshop: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def time(use: dict[str, int]) -> float:
        is_best = (use["block_n"], use["num_stages"], use["ctas_per_sm"], use["min_split"]) == (32, 4, 4, 64)
        return 10.0 + use["block_n"] / 32 + abs(use["ctas_per_sm"] - 4) / 8 + use["min_split"] / 640 - is_best

    monkeypatch.setattr(workshop.steps, "AttentionSteps", steps_of(time))
    found = workshop.steps.tune([], workshop.steps.Entry(128, 32), 1e9)
    (entry,) = found.pop("decode_attention")
    assert not found
    assert entry["when"] == {"block_d": 128, "kv_bytes": 2, "m": 32}
    assert entry["by"] == "steps"
    assert entry["use"] == {"block_n": 32, "num_warps": 2, "num_stages": 4, "ctas_per_sm": 4, "min_split": 64}
    assert list(entry["use"]) == list(FIRST)


def test_what_nothing_is_better_than_stays(workshop: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workshop.steps, "AttentionSteps", steps_of(lambda use: 1.0 if use == FIRST else 1.1))
    assert workshop.steps.tune([], workshop.steps.Entry(128, 32), 1e9) == {}


def test_models_of_a_head_size_are_searched_together(
    workshop: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []

    def tune(models: list[str], entry: Any, seconds: float) -> dict[str, Any]:
        searched.append((models, entry.block_d, entry.m))
        return {}

    monkeypatch.setattr(workshop.steps, "tune", tune)
    monkeypatch.setattr(workshop.steps, "make_model", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "")
    arguments = SimpleNamespace(models="qwen3-0.6b,llama-3.2-1b,llama-3.1-8b", rows="24,32,1", seconds=1)
    workshop.steps.run(arguments, lambda found: None)
    large, small = ["qwen3-0.6b", "llama-3.1-8b"], ["llama-3.2-1b"]
    assert searched == [(large, 128, 1), (large, 128, 32), (small, 64, 1), (small, 64, 32)]


def test_only_few_rows_are_long_and_none_longer_than_the_model(workshop: SimpleNamespace) -> None:
    from bench_step import MAX_MODEL_LEN, REPLAYS, ROOM

    assert workshop.steps.contexts_of(64) == workshop.steps.CONTEXTS
    assert workshop.steps.contexts_of(32) == workshop.steps.contexts_of(1)
    assert max(workshop.steps.contexts_of(32)) + REPLAYS + ROOM <= MAX_MODEL_LEN


def test_attention_tuned_alone_leaves_what_steps_chose(workshop: SimpleNamespace) -> None:
    when = {"block_d": 128, "kv_bytes": 2, "m": 32}
    table = {"decode_attention": [{"when": when, "use": FIRST, "by": "steps"}, {"when": {"m": 1}, "use": FIRST}]}
    assert workshop.tune.chosen_in_steps(table) == [("decode_attention", when)]
    assert when in [target.when for target in workshop.tune.targets(True)]


@pytest.mark.parametrize("path", sorted(launch.TUNED.glob("*.json")), ids=lambda path: path.stem)
def test_a_search_in_steps_can_find_what_it_has_found(workshop: SimpleNamespace, path: Path) -> None:
    for entry in json.loads(path.read_text()).get("decode_attention", []):
        if entry.get("by") == "steps":
            use = entry["use"]
            assert (use["block_n"], use["num_warps"], use["num_stages"]) in workshop.steps.TILES
            assert use["ctas_per_sm"] in workshop.steps.CTAS_PER_SM
            assert use["min_split"] in workshop.steps.MIN_SPLITS
