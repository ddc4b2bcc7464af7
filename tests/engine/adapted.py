"""Small engines that take adapters, and adapters as a front end names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.engine.llm_engine import LLMEngine
from tests.engine.drive import engine_for


def source_of(folder: Path) -> AdapterSource:
    """An adapter's files as they are now, under the folder's name."""
    status = [(folder / name).stat() for name in ("adapter_config.json", "adapter_model.safetensors")]
    return AdapterSource(
        folder.name, str(folder), max(each.st_mtime_ns for each in status), sum(each.st_size for each in status)
    )


def adapted_engine(folder: Path, kind: str = "slots", **settings: Any) -> LLMEngine:
    """kind: of the runner, as in `drive.engine_for`."""
    usual = {"max_num_seqs": 5, "num_gpu_blocks_override": 400, "enable_lora": True, "max_lora_rank": 8}
    return engine_for(folder, kind, **{**usual, **settings})
