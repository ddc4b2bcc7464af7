"""What a deployment can get wrong that only the engine can see, said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.config import engine_config_from_dict
from cb_backend.engine.llm_engine import create_engine
from cb_backend.errors import ConfigError
from tests.server.tiny_checkpoint import write_tiny_checkpoint


def test_kernels_that_need_a_gpu_are_refused_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cb_backend.engine.runner.runner_factory.IS_INTERPRETING", False)
    folder = str(write_tiny_checkpoint(tmp_path))
    config = engine_config_from_dict({"model": folder, "device": "cpu", "attention_backend": "triton"})
    with pytest.raises(ConfigError, match="attention_backend is 'triton', whose kernels need a GPU; use 'torch'"):
        create_engine(config)
