"""The kernels' benchmark: what it measures is what the twin computes, and what fails is a row that says so."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cb_backend.cli.paths import checkout_path
from cb_backend.study.roofline import CardLimits, ModelShape

CARD = CardLimits(bandwidth=1e12, flops=1e14)
SMALL = ModelShape(
    num_layers=1, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64, vocab_size=999
)
OPS = (
    "rms_norm", "silu_mul", "qkv_post", "decode_attention", "decode_attention_fp8", "prefill_attention",
    "prefill_attention_fp8", "sample", "lora",
)  # fmt: skip


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> SimpleNamespace:
    """The scripts of `kernels/`, with a small model; float16, as the interpreter cannot multiply bfloat16."""
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import bench
    import cases
    import roofline

    monkeypatch.setitem(roofline.MODELS, "small", SMALL)
    monkeypatch.setattr(cases, "DTYPE", torch.float16)
    monkeypatch.setitem(cases._randn.__kwdefaults__, "dtype", torch.float16)
    return SimpleNamespace(bench=bench, cases=cases)


def smallest(workshop: SimpleNamespace, op: str) -> Any:
    return min(workshop.cases.cases_of(op, ["small"], True), key=lambda case: case.work.num_bytes)


@pytest.mark.parametrize("op", OPS)
def test_kernel_and_twin_of_a_case_agree(op: str, workshop: SimpleNamespace) -> None:
    torch.manual_seed(0)
    launch = smallest(workshop, op).make()
    found, wanted = launch.compared(launch.kernel({})), launch.compared(launch.twin())
    assert workshop.bench.relative_error(found, wanted) < workshop.bench.TOLERANCE
    assert all(tensor.float().abs().sum() > 0 for tensor in wanted if tensor.dtype != torch.bool)


def test_the_sizes_that_the_figures_are_given_for_are_measured(workshop: SimpleNamespace) -> None:
    assert workshop.bench.OPS == OPS
    decode = {case.peer for case in workshop.cases.cases_of("decode_attention", ["small"], False)}
    assert decode >= {("decode", "small", rows, context) for rows in (1, 32, 256) for context in (512, 2048, 8192)}
    prefill = {case.peer for case in workshop.cases.cases_of("prefill_attention", ["small"], False)}
    assert prefill >= {("prefill", "small", 1, context) for context in (2048, 8192)}


def test_a_kernel_that_is_not_its_twin_is_a_row_with_an_error(workshop: SimpleNamespace) -> None:
    case = smallest(workshop, "silu_mul")
    wrong = workshop.cases.Launch(lambda plans: torch.ones(3), lambda: torch.full((3,), 1.1), lambda out: [out])
    failing = workshop.cases.Case(op=case.op, model="small", label="l", work=case.work, make=lambda: wrong)
    row = workshop.bench.run_case(failing, CARD, {})
    assert row == {"op": "silu_mul", "model": "small", "case": "l", "error": row["error"]}
    assert row["error"].startswith("ValueError: kernel and twin disagree: relative error 0.0909")


def test_relative_errors(workshop: SimpleNamespace) -> None:
    error = workshop.bench.relative_error
    assert error([torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 4.0])]) == 0
    assert error([torch.tensor([3.0, 4.5])], [torch.tensor([3.0, 4.0])]) == pytest.approx(0.1)
    assert error([torch.ones(2), torch.tensor([1, 2, 3, 9])], [torch.ones(2), torch.tensor([1, 2, 3, 4])]) == 0.25
    assert math.isnan(error([torch.tensor([math.nan]), torch.ones(1)], [torch.ones(1), torch.ones(1)]))


def test_the_peers_times_are_found_by_their_case(workshop: SimpleNamespace, tmp_path: Path) -> None:
    line = 'MICRO {{"peer": "{}", "kind": "decode", "model": "small", "batch": 32, "ctx": 512, "us": {}}}\n'
    path = tmp_path / "peers.txt"
    path.write_text("starting\n" + line.format("fa3", 7.5) + "12:00 " + line.format("flashinfer", 9.0))
    assert workshop.bench.read_peers(path) == {("decode", "small", 32, 512): 7.5}
    assert workshop.bench.read_peers(None) == {}
