"""The demo's real checkpoint: the text a known-good implementation produces. Fetches it once, as the demo does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from cb_backend.cli.demo_model import ensure_demo_model
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import create_engine
from tests.engine.drive import config, run
from tests.models.paged_model import PagedModel

# Greedy, float32, by transformers.
EXPECTED = [7042, 30, 198, 198, 504, 2988, 314, 42]


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_demo_model(print)


@pytest.fixture(scope="module")
def prompt(folder: Path) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("The capital of France is").ids
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [2, 5])
def test_greedy_tokens_of_the_model(chunk: int, folder: Path, prompt: list[int]) -> None:
    paged = PagedModel(folder, max_len=32)
    paged.start(0, len(prompt))
    tokens = [int(paged.prefill(0, prompt, chunk)[-1].argmax())]
    while len(tokens) < len(EXPECTED):
        tokens.append(int(paged.step([(0, tokens[-1])], [])[0].argmax()))
    assert tokens == EXPECTED


@pytest.mark.slow
def test_greedy_tokens_of_the_engine_alone_and_in_company(folder: Path, prompt: list[int]) -> None:
    """In company: two other requests join while it runs, its prompt comes in chunks, and once more from the cache."""
    engine = create_engine(
        config(str(folder), max_num_batched_tokens=4, block_size=4, num_gpu_blocks_override=40, max_model_len=64)
    )
    greedy = TokenRules(max_tokens=len(EXPECTED), temperature=0.0, seed=0)
    assert run(engine, [prompt], greedy).token_ids[0] == EXPECTED
    others = [np.arange(100, 109).tolist(), np.arange(500, 503).tolist()]
    got = run(engine, [prompt, *others], greedy, arrivals=[0, 2, 4])
    assert got.token_ids[0] == EXPECTED
    assert engine.stats().num_cached_prompt_tokens >= 4
