"""X1: a captured step launches what it always has. Whoever does not use a feature pays nothing for it.

The lists were recorded before the features that they guard against: an op more, or another shape, is a step that costs
all requests something.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cb_backend.engine.llm_engine import create_engine
from cb_backend.engine.runner import runner_factory
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.step_shapes import StepShape
from cb_backend.layers.ops import Ops, resolve_ops
from tests.engine.drive import config
from tests.engine.fake_cuda import FakeCuda
from tests.engine.fake_device import fake_device


def layers(num_tokens: int, *attention: str) -> list[str]:
    """Two layers of 48 columns, the rows' norm and projection of the one before included."""
    rows = f"[{num_tokens}, 48]"
    middle = [
        f"qkv_post [{num_tokens}, 96]", *attention, f"linear {rows}", f"add_rms_norm {rows}", f"linear_silu_mul {rows}",
        f"linear [{num_tokens}, 40]",
    ]  # fmt: skip
    return [f"rms_norm {rows}", f"linear {rows}", *middle, f"add_norm_linear {rows}", *middle, f"add_rms_norm {rows}"]


# By shape: ops of a step, with the shape of the first argument. Recorded from the code before the features.
RECORDED = {
    StepShape(4): [
        "apply_deltas [5, 16]", "prepare_rows [4]", "plan_decode [4]",
        *layers(4, "decode_attention [4, 4, 12]"),
        "linear [4, 48]", "mask_stop_ids [4, 97]", "sample [4, 97]", "commit_tokens [4]",
    ],
    StepShape(4, 32, 4): [
        "apply_deltas [5, 16]", "prepare_rows [8]", "plan_decode [4]",
        *layers(36, "decode_attention [4, 4, 12]", "prefill_attention [32, 4, 12]"),
        "linear [8, 48]", "mask_stop_ids [8, 97]", "sample [8, 97]", "commit_tokens [8]",
    ],
}  # fmt: skip


class Recorder:
    """Notes each op that is called, with the shape of its first argument."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def ops(self, backend: str) -> Ops:
        ops = resolve_ops(backend)
        named = {field.name: getattr(ops, field.name) for field in dataclasses.fields(ops) if field.name != "backend"}
        return dataclasses.replace(ops, **{name: self._noting(name, op) for name, op in named.items()})

    def _noting(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            shape = list(args[0].shape) if args and isinstance(args[0], torch.Tensor) else ""
            self.calls.append(f"{name} {shape}".strip())
            return op(*args, **kwargs)

        return noted


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_device(monkeypatch) as fake:
        yield fake


def captured_ops(folder: Path, shape: StepShape, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    """The ops of one captured step."""
    recorder = Recorder()
    monkeypatch.setattr(runner_factory, "resolve_ops", recorder.ops)
    settings = {
        "block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 512, "max_num_seqs": 4,
        "num_gpu_blocks_override": 40, "attention_backend": "torch", "device": "cuda", **changes,
    }  # fmt: skip
    runner = create_engine(config(str(folder), **settings)).runner
    assert isinstance(runner, SlotRunner)
    assert shape in runner.graphs.shapes
    graph, _ = runner.graphs._graphs[shape]
    recorder.calls.clear()
    graph.replay()
    return recorder.calls


@pytest.mark.parametrize("shape", RECORDED, ids=["decode", "mixed"])
def test_x1_a_captured_step_launches_what_it_always_has(
    shape: StepShape, gqa_folder: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert captured_ops(gqa_folder, shape, monkeypatch) == RECORDED[shape]


@pytest.mark.parametrize("shape", RECORDED, ids=["decode", "mixed"])
def test_x1_steps_without_adapters_launch_the_same_where_adapters_are_enabled(
    shape: StepShape, gqa_folder: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert captured_ops(gqa_folder, shape, monkeypatch, enable_lora=True, max_lora_rank=8) == RECORDED[shape]


def test_steps_with_adapters_shrink_and_expand_four_times_in_a_layer_and_plan_once(
    gqa_folder: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = StepShape(4, has_adapters=True)
    names = [
        call.partition(" ")[0]
        for call in captured_ops(gqa_folder, shape, monkeypatch, enable_lora=True, max_lora_rank=8)
    ]
    # Of the attention's products, of gate and up with the activation, of down; in each layer. A product is in it.
    of_layers = [
        *["linear_shrink", "lora_expand"] * 2,
        "linear_shrink",
        "lora_expand_gated",
        "linear_shrink",
        "lora_expand",
    ] * 2
    assert [name for name in names if "lora" in name or "shrink" in name or "adapters" in name] == [
        "plan_adapters",
        *of_layers,
    ]
    fused = {"add_norm_linear", "linear_silu_mul"}  # what would hide where adapters add
    assert not fused.intersection(names)
    base = [call.partition(" ")[0] for call in RECORDED[StepShape(4)]]
    assert sum(name not in fused for name in names) == len(names) == len(base) + 1 + len(of_layers) // 2 + 1


def test_x1_the_host_brings_a_steady_decode_step_nothing_but_slots_and_deltas() -> None:
    """What a feature needs of the host comes in segments of its own shapes."""
    assert list(StepShape(4).sizes()) == ["slots", "deltas"]
    assert StepShape(4).sizes() == {"slots": 4, "deltas": 48}


def test_x1_the_recorder_notices_an_op_more(gqa_folder: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the comparison above proves what it says."""
    finish = SlotRunner._finish_step

    def finish_twice(runner: SlotRunner, *arguments: Any) -> Any:
        finish(runner, *arguments)
        return finish(runner, *arguments)

    monkeypatch.setattr(SlotRunner, "_finish_step", finish_twice)
    got = captured_ops(gqa_folder, StepShape(4), monkeypatch)
    assert got == RECORDED[StepShape(4)] + RECORDED[StepShape(4)][-4:]
