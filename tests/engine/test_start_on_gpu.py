"""How an engine starts on a GPU: the order of the graphs, what its log says, what it says where memory lacks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.engine.runner import cuda_warm_up
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.step_shapes import step_shapes
from tests.engine.drive import config
from tests.engine.fake_cuda import FakeCuda
from tests.engine.fake_device import fake_device
from tests.engine.test_runner_factory import full_gpu

SETTINGS = {
    "device": "cuda", "block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 12,
    "num_gpu_blocks_override": 200, "attention_backend": "torch",
}  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_device(monkeypatch) as fake:
        yield fake


def start(folder: Path) -> LLMEngine:
    return create_engine(config(str(folder), **SETTINGS))


def test_graphs_are_captured_largest_first_into_one_pool_and_the_log_says_how_far(
    folder: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So the pool is sized once, by the largest."""
    pools: list[object] = []

    def capture(graph: Any, pool: object = None) -> contextlib.AbstractContextManager[None]:
        pools.append(pool)
        return fake.capture(graph, pool)

    monkeypatch.setattr(torch.cuda, "graph", capture)
    runner = start(folder).runner
    assert isinstance(runner, SlotRunner)
    sizes = [shape.num_tokens for shape in runner.graphs.shapes]  # in the order of their capture
    assert sizes == sorted((shape.num_tokens for shape in step_shapes(12, 64)), reverse=True)
    assert pools == [None, *[fake.graphs[0].pool()] * (len(sizes) - 1)]
    text = capsys.readouterr().err
    progress = re.findall(r"capturing CUDA graphs: (\d+)/(\d+) ", text)
    done = [*range(16, len(sizes), 16), len(sizes)]
    assert progress == [(str(number), str(len(sizes))) for number in done]
    for line in ("] 100%, ", "0 kernels compiled in", "KV cache: 200 blocks of 4 tokens", "started in "):
        assert line in text


def test_kernels_that_cannot_be_compiled_ahead_are_compiled_by_the_warm_up(
    folder: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(launch_all: object, is_rehearsal: bool = False) -> int:
        raise TimeoutError("compiling 9 kernels took longer than 180 s")

    monkeypatch.setattr(cuda_warm_up, "compile_ahead", fail)
    start(folder)
    assert fake.graphs
    assert "kernels are compiled one by one: compiling 9 kernels took longer than 180 s" in capsys.readouterr().err


def test_a_step_that_does_not_fit_names_what_to_lower(
    folder: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_warm_up, "warm_up", full_gpu)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens 64 and max_num_seqs 12 does not fit.*lower one of"):
        start(folder)


def test_graphs_that_do_not_fit_name_what_to_lower(
    folder: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "graph", full_gpu)
    with pytest.raises(ConfigError, match=r"not enough memory to start \(.*2\.00 GiB.*\); lower max_num_seqs \(12\)"):
        start(folder)
