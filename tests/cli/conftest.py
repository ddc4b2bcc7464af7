"""Checkpoints that several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.test_published_configs import write_tokenizer
from tests.models.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), eos_id=1)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is served."""
    return write_tokenizer(write_checkpoint("llama-gqa", tmp_path_factory.mktemp("plain")), eos_id=1)
