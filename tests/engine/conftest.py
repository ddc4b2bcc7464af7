"""Checkpoints that the tests of the engine read and do not change, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.engine.grammar.grammar_compiler import GrammarCompiler
from tests.engine.structured import EOS_ID, Texts
from tests.models.tiny_checkpoints import write_checkpoint
from tests.server.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a tokenizer that knows every byte."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def gqa_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights for token ids alone, grouped queries; transformers reads it too."""
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("gqa"))


@pytest.fixture(scope="session")
def texts(folder: Path) -> Texts:
    return Texts(folder)


@pytest.fixture(scope="module")
def compiler(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(str(folder), VOCAB_SIZE, (EOS_ID,))
