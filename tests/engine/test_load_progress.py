"""What is told of weights before and while they are loaded: pytest tests/engine/test_load_progress.py"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.runner import load_progress, runner_factory
from cb_backend.engine.runner.load_progress import LoadProgress
from cb_backend.models import registry
from tests.server.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def config(checkpoint: Path, dtype: str = "float32") -> EngineConfig:
    return EngineConfig(model=str(checkpoint), device="cpu", dtype=dtype, max_num_seqs=2, kv_cache_memory_bytes=1 << 20)


def test_h14_weights_that_do_not_fit_are_told_before_any_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_progress, "free_memory", lambda device: (1000, 1 << 40))
    monkeypatch.setattr(registry.weights, "fill_from_checkpoint", lambda *_: pytest.fail("weights were read"))
    told = (
        r"not enough memory for the weights of '.*': they take .* KiB, and 1\.0 KiB of 1024\.00 GiB are free on the cpu"
    )
    with pytest.raises(ConfigError, match=told):
        runner_factory.create_runner(config(checkpoint))


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4), ("bfloat16", 2)])
def test_h14_the_size_is_that_of_the_weights_in_the_dtype_they_get(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, bytes_each: int
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(LoadProgress, "begin", lambda self, num_bytes: sizes.append(num_bytes))
    runner, _ = runner_factory.create_runner(config(checkpoint, dtype))
    assert sizes == [sum(placement.target.numel() for placement in runner.model.placements()) * bytes_each]


def test_h15_one_bar_with_name_bytes_rate_and_seconds() -> None:
    said: list[str] = []
    progress = LoadProgress("org/name", torch.device("cpu"), said.append)
    progress.begin(3 << 20)
    for done in (1, 2, 3, 4, 5, 8):
        progress.at(done << 20, 8 << 20)
    assert said[0] == "loading org/name: 3072.0 KiB of weights"
    rate = r"read in \d+\.\d s( \(\d+\.\d\d GB/s\))?"
    assert re.fullmatch(r"loading org/name: \[#{5}\.{15}\]  25%, 2048\.0 KiB of 8192\.0 KiB " + rate, said[1])
    assert re.fullmatch(r"loading org/name: \[#{10}\.{10}\]  50%, 4096\.0 KiB of 8192\.0 KiB " + rate, said[2])
    assert re.fullmatch(r"loading org/name: \[#{20}\] 100%, 8192\.0 KiB of 8192\.0 KiB " + rate, said[3])
    assert len(said) == 4


def test_h15_a_slow_disk_is_told_of_between_the_quarters(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clock = iter((0.0, 0.0, 9.0, 11.0, 12.0, 22.0))
    monkeypatch.setattr(load_progress.time, "monotonic", lambda: next(clock))
    progress = LoadProgress("org/name", torch.device("cpu"), said.append)
    progress.begin(100 << 20)
    for percent in (1, 2, 3, 4):
        progress.at(percent << 20, 100 << 20)
    assert [line.partition("]")[2] for line in said[1:]] == [
        "   2%, 2048.0 KiB of 0.10 GiB read in 11.0 s (0.00 GB/s)",
        "   4%, 4096.0 KiB of 0.10 GiB read in 22.0 s (0.00 GB/s)",
    ]
