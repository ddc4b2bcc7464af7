"""What a deployment can get wrong that only the engine can see, said in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.llm_engine import create_engine
from cb_backend.engine.runner import runner_factory
from tests.server.tiny_checkpoint import write_tiny_checkpoint


def test_kernels_that_need_a_gpu_are_refused_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cb_backend.engine.runner.runner_factory.IS_INTERPRETING", False)
    folder = str(write_tiny_checkpoint(tmp_path))
    config = engine_config_from_dict({"model": folder, "device": "cpu", "attention_backend": "triton"})
    with pytest.raises(ConfigError, match="attention_backend is 'triton', whose kernels need a GPU; use 'torch'"):
        create_engine(config)


GPU_IS_FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is free."
    " Including non-PyTorch memory, this process has 77.8 GiB memory in use. If reserved but unallocated memory is"
    " large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)


def full_gpu(*args: object, **kwargs: object) -> None:
    raise torch.OutOfMemoryError(GPU_IS_FULL)


def full_host(*args: object, **kwargs: object) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("fill", "reason"),
    [
        (
            full_gpu,
            r"Tried to allocate 2\.00 GiB\. GPU 0 has .* of which 1\.25 GiB is free",
        ),
        (full_host, r".*you tried to allocate 1152921504606846976 bytes.*"),
    ],
)
@pytest.mark.parametrize("where", ["load_model", "KVCacheStorage"])
def test_memory_that_does_not_suffice_is_said_with_a_remedy(
    where: str, fill: Callable[..., None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_factory, where, fill)
    config = engine_config_from_dict({"model": str(write_tiny_checkpoint(tmp_path)), "device": "cpu"})
    with pytest.raises(ConfigError, match=rf"^not enough memory to start \([^(]*{reason}\); lower max_num_seqs"):
        create_engine(config)


def test_other_failures_of_torch_are_not_called_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runner_factory, "load_model", fail)
    config = engine_config_from_dict({"model": str(write_tiny_checkpoint(tmp_path)), "device": "cpu"})
    with pytest.raises(RuntimeError, match="illegal memory access"):
        create_engine(config)
