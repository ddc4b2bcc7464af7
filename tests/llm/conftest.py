"""One tiny checkpoint and one `LLM` over it for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cb_backend import LLM
from tests.server.tiny_checkpoint import write_tiny_checkpoint

ARGUMENTS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="package")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **ARGUMENTS) as loaded:
        yield loaded
