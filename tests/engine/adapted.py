"""Small engines that take adapters, and adapters as a front end names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.support.adapter_files import folder_stamp
from tests.engine.drive import engine_for


def source_of(folder: Path) -> AdapterSource:
    """An adapter's files as they are now, under the folder's name."""
    stamp = folder_stamp(folder)
    assert stamp is not None, f"{folder} holds no adapter"
    return stamp.source(folder.name, str(folder), is_settled=True)


def adapted_engine(folder: Path, kind: str = "slots", **settings: Any) -> LLMEngine:
    """kind: of the runner, as in `drive.engine_for`."""
    usual = {"max_num_seqs": 5, "num_gpu_blocks_override": 400, "enable_lora": True, "max_lora_rank": 8}
    return engine_for(folder, kind, **{**usual, **settings})
