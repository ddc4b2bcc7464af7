"""Embeddings, classes and scores are transformers' own: alone, in chunks, beside streams, cached, preempted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine
from tests.engine.drive import Run, engine_for, run
from tests.models.tiny_checkpoints import random_tokens, write_checkpoint

LENGTHS = (1, 3, 4, 5, 16, 17, 37, 50)
PROMPTS = [random_tokens(length, seed=length) for length in LENGTHS]
LAST = TokenRules(seed=0, pooling=PoolingRules())
MEAN = TokenRules(seed=0, pooling=PoolingRules(pooling="mean"))
CLASSES = TokenRules(seed=0, pooling=PoolingRules(readout="classifier"))
HEAD = TokenRules(seed=0, pooling=PoolingRules(readout="head", token_ids=(11, 5)))
STREAM = TokenRules(seed=0, temperature=0.0, max_tokens=12, ignore_eos=True)
NUM_LABELS = 3


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of Qwen3-Embedding and Qwen3-Reranker: heads of q and k are normed."""
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def classifier_folder(name: str, folder: Path) -> Path:
    """A sequence classifier with the decoder of a tiny checkpoint."""
    base = write_checkpoint(name, folder / "base")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=NUM_LABELS, pad_token_id=0)
    torch.manual_seed(3)
    torch.nn.init.normal_(model.score.weight, 0.0, 0.5)
    model.save_pretrained(folder / "classifier")
    return folder / "classifier"


def states(folder: Path, prompt: Sequence[int]) -> torch.Tensor:
    """transformers' hidden states after the final norm, [num_tokens, hidden_size]."""
    with torch.inference_mode():
        return AutoModel.from_pretrained(folder, dtype=torch.float32)(torch.tensor([prompt])).last_hidden_state[0]


def expected(folder: Path, prompt: Sequence[int], rules: TokenRules) -> list[float]:
    pooling = rules.pooling
    assert pooling is not None
    with torch.inference_mode():
        if pooling.readout == "classifier":
            model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
            return model(torch.tensor([prompt])).logits[0].tolist()
        if pooling.readout == "head":
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            return model(torch.tensor([prompt])).logits[0, -1, list(pooling.token_ids)].tolist()
    hidden = states(folder, prompt)
    return (hidden.mean(0) if pooling.pooling == "mean" else hidden[-1]).tolist()


def assert_equal(found: Sequence[float], wanted: Sequence[float]) -> None:
    """Within 1e-5 of the vector's length."""
    difference = np.linalg.norm(np.subtract(found, wanted)) / np.linalg.norm(wanted)
    assert difference < 1e-5, f"{difference:.1e} apart"


def both(folder: Path, kind: str = "slots", **changes: object) -> LLMEngine:
    return engine_for(folder, kind, **{"runner": "both", "classifier_from_token": ("a", "b"), **changes})


def check(folder: Path, got: Run, rules: Sequence[TokenRules], prompts: Sequence[list[int]] = PROMPTS) -> None:
    for index, (prompt, rule) in enumerate(zip(prompts, rules, strict=True)):
        if rule.pooling is None:
            assert got.reasons[index] is FinishReason.LENGTH
            continue
        assert got.reasons[index] is FinishReason.STOP
        assert got.token_ids[index] == [], "it has no token"
        assert_equal(got.pooled[index], expected(folder, prompt, rule))


@pytest.mark.parametrize("run_ahead", [0, 3])
@pytest.mark.parametrize("budget", [1, 7, 16, 64])
@pytest.mark.parametrize("rules", [LAST, MEAN], ids=["last", "mean"])
def test_embeddings_in_chunks_of_any_size(qwen: Path, rules: TokenRules, budget: int, run_ahead: int) -> None:
    engine = engine_for(
        qwen, "slots", runner="pooling", max_num_batched_tokens=budget, max_num_seqs=min(4, budget), run_ahead=run_ahead
    )
    got = run(engine, PROMPTS, rules)
    check(qwen, got, [rules] * len(PROMPTS))
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert stats.num_free_blocks == engine.info.num_blocks
    assert stats.num_output_tokens == 0
