"""kernels/tune_lora.py: what it searches in steps with adapters, and what becomes an entry; a step of prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cb_backend.cli.paths import checkout_path
from cb_backend.kernels import launch
from cb_backend.layers.ops import resolve_ops
from cb_backend.models.registry import read_model_config
from tests.models.tiny_checkpoints import write_checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import bench_step
    import tune
    import tune_lora

    monkeypatch.setattr(tune_lora, "DEVICE", CPU)
    return SimpleNamespace(tune=tune, lora=tune_lora, bench=bench_step)


class MadeUpSteps:
    """A step is what its kernels would be launched with; its time is a function of that."""

    def __init__(self, entries: list[Any], time: Callable[[dict[Any, dict[str, int]]], float]) -> None:
        self.entries, self.time, self.is_closed = entries, time, False

    def compile(self, many: list[Any]) -> None: ...

    def make(self, settings: dict[Any, dict[str, int]]) -> dict[Any, dict[str, int]]:
        from captured_steps import using

        with using(settings):
            return {each: dict(launch.launch_parameters(each.op, CPU, **each.when)) for each in self.entries}

    def milliseconds(self, step: dict[Any, dict[str, int]]) -> float:
        return self.time(step)

    def close(self) -> None:
        self.is_closed = True


def test_every_kernel_of_adapters_and_the_plain_product_of_gate_and_up_is_searched(workshop: SimpleNamespace) -> None:
    names = [each.name for each in workshop.lora.changes_of("llama-3.1-8b", [1, 8, 128])]
    assert names == [
        "linear {'n': 28672, 'k': 4096, 'm': 1}",
        "linear {'n': 28672, 'k': 4096, 'm': 8}",
        "linear {'n': 28672, 'k': 4096, 'm': 128}",
        "lora_shrink {'k': 4096, 'm': 16, 'bytes': 2}",
        "lora_shrink {'k': 14336, 'm': 16, 'bytes': 2}",
        "lora_expand {'n': 6144, 'm': 16, 'bytes': 2}",
        "lora_expand {'n': 4096, 'm': 16, 'bytes': 2}",
        "lora_expand_gated {'n': 14336, 'm': 16, 'bytes': 2}",
    ]


def test_steps_that_the_file_has_an_entry_for_are_searched_by_that_one(
    workshop: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"when": {"k": 4096, "m": 16, "bytes": 2, "rows": 256}, "use": {}}
    monkeypatch.setattr(workshop.lora, "read_table", lambda device: {"lora_shrink": [own]})
    names = [each.name for each in workshop.lora.changes_of("llama-3.1-8b", [8, 32, 200]) if each.op == "lora_shrink"]
    assert names == [
        "lora_shrink {'k': 4096, 'm': 16, 'bytes': 2}",
        "lora_shrink {'k': 4096, 'm': 16, 'bytes': 2, 'rows': 256}",
        "lora_shrink {'k': 14336, 'm': 16, 'bytes': 2}",
    ]


def test_what_gains_becomes_an_entry_that_launches_find(workshop: SimpleNamespace) -> None:
    changes = workshop.lora.changes_of("llama-3.1-8b", [8])
    product, shrink, *_ = changes
    steps = MadeUpSteps(
        list(changes),
        lambda step: (
            10.0
            + abs(step[product].get("block_n", 500) - 128) / 100
            + abs(math.log2(step[shrink]["num_warps"] / 8)) / 10
        ),
    )
    table = workshop.lora.tune(steps, changes, 3600.0)
    assert steps.is_closed
    assert set(table) == {"linear", "lora_shrink"}, "what gained nothing has no entry"
    (found,) = table["linear"]
    assert (found["when"], found["use"]["block_n"], found["by"]) == (product.when, 128, "steps")
    assert [each["use"]["num_warps"] for each in table["lora_shrink"]] == [8]


def test_what_gained_in_the_search_and_no_more_at_its_end_has_no_entry(
    workshop: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that grows warm, or slower beside others, makes what is tried early look better than what came after."""
    changes = workshop.lora.changes_of("llama-3.1-8b", [8])
    shrink = list(changes)[1]
    search, seen = workshop.lora.run_search, []

    def search_and_cool(of: Any, tried: Any) -> None:
        search(of, tried)
        seen.append(dict(of.best[shrink]))

    monkeypatch.setattr(workshop.lora, "run_search", search_and_cool)
    steps = MadeUpSteps(
        list(changes), lambda step: 10.0 if seen else 10.0 + abs(math.log2(step[shrink]["num_warps"] / 8)) / 10
    )
    assert workshop.lora.tune(steps, changes, 3600.0) == {}
    assert seen[0]["num_warps"] == 8, "the search had found it"


def test_the_command_prints_what_it_finds(
    workshop: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = {"lora_expand": [{"when": {"n": 4096}, "use": {"block_n": 64}, "by": "steps"}]}
    monkeypatch.setattr(workshop.lora, "run", lambda arguments, save: save(found))
    monkeypatch.setattr("sys.argv", ["tune.py", "lora", "--dry-run"])
    assert workshop.tune.main() == 0
    assert '"lora_expand": [{"when": {"n": 4096}' in capsys.readouterr().out


@torch.inference_mode()
def test_steps_of_prompts_and_of_rows_go_through_as_many_adapters_as_they_say(
    workshop: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On the twins: every token is of an adapter, and the plan has places for just these."""
    spec = read_model_config(write_checkpoint("llama-gqa", tmp_path_factory.mktemp("model")))
    spec = dataclasses.replace(spec, vocab_size=300)
    bench, lora = workshop.bench, workshop.lora
    monkeypatch.setattr(bench, "DEVICE", CPU)
    monkeypatch.setattr(bench, "DTYPE", torch.float32)
    monkeypatch.setattr(bench, "MAX_MODEL_LEN", 64)
    monkeypatch.setattr(bench, "spec_of", lambda name: spec)
    monkeypatch.setattr(bench, "resolve_ops", lambda backend: resolve_ops("torch"))
    monkeypatch.setattr(bench, "ROOM", 8)
    monkeypatch.setattr(lora, "PROMPT_TOKENS", 48)
    monkeypatch.setattr(lora, "NUM_PROMPTS", 3)
    model = bench.make_model("tiny", 4)
    steps = [*lora.prompt_steps(model).steps, *lora.decode_steps(model, [1, 4], 32).steps]
    seen = []
    for runner, buffers in steps:
        runner.run_step(buffers)
        assert not buffers.result[1].any(), "no row failed"
        plan = runner.adapters.plan_step(buffers, runner.state.adapter)
        tokens = {adapter: where.stop - where.start for adapter, where in plan.by_item()}
        seen.append((tokens, plan.max_adapters))
    assert seen == [({0: 16, 1: 16, 2: 16}, 3), ({0: 1}, 1), ({0: 1, 1: 1, 2: 1, 3: 1}, 4)]
