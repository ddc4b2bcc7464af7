"""Log-probabilities are the model's own, as transformers computes them, in every way of running a step."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.token_rules import TokenRules
from tests.engine.drive import Run, check_figures, engine_for, run
from tests.models.tiny_checkpoints import random_tokens, reference_logits

PROMPTS = [random_tokens(length, seed=length) for length in (5, 17, 4, 9)]
PARAMS = [
    TokenRules(max_tokens=12, temperature=0.0, seed=0, logprobs=3, ignore_eos=True),
    TokenRules(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True),
    # What a row keeps and rules out must not show in its figures.
    TokenRules(max_tokens=9, temperature=1.5, top_k=4, seed=6, logprobs=5, min_tokens=9, stop_token_ids=(8, 30)),
    TokenRules(max_tokens=12, temperature=1.0, seed=7, logprobs=0, ignore_eos=True),
]


def check_against_transformers(folder: Path, got: Run, prompt_index: int, num_top: int) -> None:
    tokens = got.token_ids[prompt_index]
    logits = reference_logits(folder, PROMPTS[prompt_index], tokens)[len(PROMPTS[prompt_index]) - 1 : -1]
    expected = logits.log_softmax(-1)
    figures = got.logprobs[prompt_index]
    check_figures(figures, tokens, expected, num_top)


@pytest.mark.parametrize(("kind", "run_ahead"), [("reference", 0), ("slots", 0), ("slots", 4)])
def test_figures_are_those_of_transformers(gqa_folder: Path, kind: str, run_ahead: int) -> None:
    """In one batch with a row that does not ask, with chunks and joins."""
    engine = engine_for(gqa_folder, kind, run_ahead=run_ahead)
    got = run(engine, PROMPTS, PARAMS, arrivals=[0, 0, 2, 3])
    assert set(got.logprobs) == {0, 2, 3}
    for index, num_top in ((0, 3), (2, 5), (3, 0)):
        check_against_transformers(gqa_folder, got, index, num_top)
    plain = [msgspec.structs.replace(params, logprobs=None) for params in PARAMS]
    assert run(engine_for(gqa_folder, kind), PROMPTS, plain).token_ids == got.token_ids


def test_figures_survive_preemption(gqa_folder: Path) -> None:
    roomy = run(engine_for(gqa_folder, "reference"), PROMPTS, PARAMS)
    tight = engine_for(gqa_folder, "reference", num_gpu_blocks_override=9, enable_prefix_caching=False)
    got = run(tight, PROMPTS, PARAMS)
    assert tight.stats().num_preemptions > 0
    assert got.token_ids == roomy.token_ids
    for index in (0, 2, 3):
        assert [figure.rank for figure in got.logprobs[index]] == [figure.rank for figure in roomy.logprobs[index]]
        sampled = [figure.sampled for figure in roomy.logprobs[index]]
        assert [figure.sampled for figure in got.logprobs[index]] == pytest.approx(sampled, abs=1e-4)


def test_f3_warm_prompts_around_block_borders(gqa_folder: Path) -> None:
    """Case F3: lengths block-1, block, block+1, 2*block+1, twice each: the second time from the cache."""
    engine = engine_for(gqa_folder, "reference")
    params = TokenRules(max_tokens=3, temperature=0.0, seed=0, logprobs=2, ignore_eos=True)
    for length in (3, 4, 5, 9):
        prompt = random_tokens(length, seed=100 + length)
        cold, warm = (run(engine, [prompt], params) for _ in range(2))
        assert len(cold.logprobs[0]) == 3
        for first, second in zip(cold.logprobs[0], warm.logprobs[0], strict=True):
            assert second.top_ids == first.top_ids
            assert second.top == pytest.approx(first.top, abs=1e-4)
    assert engine.stats().num_cached_prompt_tokens > 0


def test_f8_more_than_the_vocabulary_is_refused_at_the_door(gqa_folder: Path) -> None:
    """Case F8: 7 good requests are not touched by the bad one."""
    engine = engine_for(gqa_folder, "reference")
    small = msgspec.structs.replace(engine.info, vocab_size=10)
    with pytest.raises(InvalidRequestError, match="logprobs must be between 0 and 10, got 11"):
        TokenRules(logprobs=11).check(small.vocab_size)
    with pytest.raises(InvalidRequestError, match="logprobs must be between 0 and 20, got 98"):
        engine.make_request(1, np.array([5], np.int32), TokenRules(logprobs=98))
    params = TokenRules(max_tokens=2, temperature=0.0, logprobs=20, ignore_eos=True)
    got = run(engine, PROMPTS + PROMPTS[:3], params)
    assert [len(got.logprobs[index]) for index in range(7)] == [2] * 7
