"""Adapters in the library, beside transformers with each merged in: pytest tests/llm/test_adapters.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cb_backend import LLM, SamplingParams
from cb_backend.contracts.errors import ConfigError, InvalidRequestError
from tests.llm.conftest import ARGUMENTS
from tests.server.tiny_adapters import MergedReference, write_adapter
from tests.server.tiny_checkpoint import Reference

PROMPT, NUM_TOKENS = "the quick brown fox", 16


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(base / name, checkpoint, seed) for seed, name in enumerate(("doll", "sheep"))}


@pytest.fixture(scope="module")
def adapted(checkpoint: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    given = {**{name: str(folder) for name, folder in folders.items()}, "gone": "/no/such/folder"}
    with LLM(str(checkpoint), adapters=given, max_loras=1, **ARGUMENTS) as loaded:
        yield loaded


def greedy(name: str | None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, lora_name=name)


def test_each_prompt_is_answered_by_its_adapter(adapted: LLM, checkpoint: Path, folders: dict[str, Path]) -> None:
    """With one place for two adapters, so that they take turns."""
    expected = {name: MergedReference(checkpoint, folder) for name, folder in folders.items()}
    texts = {name: each.greedy_text(PROMPT, NUM_TOKENS) for name, each in expected.items()}
    texts[""] = Reference(checkpoint).greedy_text(PROMPT, NUM_TOKENS)
    assert len(set(texts.values())) == 3
    names = ["doll", "", "sheep", "doll", "sheep", ""]
    results = adapted.generate([PROMPT] * len(names), [greedy(name or None) for name in names])
    assert [result.outputs[0].text for result in results] == [texts[name] for name in names]
    assert "".join(chunk.output.text for chunk in adapted.stream(PROMPT, greedy("sheep"))) == texts["sheep"]


def test_a_name_that_is_not_there_is_refused_before_anything_runs(adapted: LLM) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"LoRA wolf is not supported, we currently support \['doll', 'sheep'"
    ):
        adapted.generate(PROMPT, greedy("wolf"))


def test_files_that_are_gone_are_an_error_of_their_own_prompt(adapted: LLM) -> None:
    good, bad = adapted.generate([PROMPT, PROMPT], [greedy("doll"), greedy("gone")])
    assert good.error is None
    assert isinstance(bad.error, InvalidRequestError)
    assert "'gone'" in str(bad.error)


def test_without_adapters_every_name_is_refused(llm: LLM, checkpoint: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"LoRA feature is not enabled\."):
        llm.generate(PROMPT, greedy("doll"))
    with pytest.raises(ConfigError, match="max_loras is 0"):
        LLM(str(checkpoint), adapters={}, max_loras=0)
