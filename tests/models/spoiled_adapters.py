"""An adapter of every module of a tiny model, as PEFT writes it, what spoils copies of it, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.adapter_table import AdapterTable
from cb_backend.models.lora_checkpoint import PackedAdapter, read_adapter
from cb_backend.models.registry import outline_adapters, read_model_config
from tests.models.adapters import ALL_MODULES, write_adapter
from tests.models.tiny_checkpoints import write_checkpoint

PREFIX = "base_model.model.model.layers.0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return write_adapter(model, folder, r=4, lora_alpha=8, target_modules=ALL_MODULES)


@pytest.fixture
def adapter(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    return tmp_path


def table_of(model: Path, max_rank: int = 8, dtype: torch.dtype = torch.float32) -> AdapterTable:
    return outline_adapters(read_model_config(model), dtype, max_rank)


def read(model: Path, adapter: Path, **options: Any) -> PackedAdapter:
    return read_adapter(adapter, read_model_config(model), table_of(model, **options))


def with_config(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def with_tensors(adapter: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(model: Path, adapter: Path, match: str, **options: Any) -> None:
    """By the reader, and offline by the check alone where the header tells."""
    with pytest.raises(ConfigError, match=match):
        read(model, adapter, **options)
