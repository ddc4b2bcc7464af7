"""Log-probabilities of prompts are transformers' own, in chunks, twice, preempted, and on both runners."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.token_rules import MAX_PROMPT_LOGPROBS, TokenRules
from cb_backend.engine.llm_engine import create_engine
from cb_backend.engine.runner.prompt_logprobs import TOKENS_AT_ONCE
from tests.engine.drive import Run, check_figures, config, engine_for, run
from tests.models.tiny_checkpoints import random_tokens, reference_logits, write_checkpoint

PROMPTS = [random_tokens(length, seed=length) for length in (5, 37, 1, 18, 2)]
GREEDY = {"max_tokens": 6, "temperature": 0.0, "seed": 0, "ignore_eos": True}
PARAMS = [
    TokenRules(**GREEDY, prompt_logprobs=3),
    TokenRules(**GREEDY, prompt_logprobs=1, presence_penalty=1.0, logprobs=2),
    TokenRules(**GREEDY, prompt_logprobs=2),  # of a single token: nothing to tell
    TokenRules(**GREEDY),
    TokenRules(**GREEDY, prompt_logprobs=0),
]


def check(folder: Path, got: Run, index: int, prompt: list[int], num_top: int) -> None:
    expected = reference_logits(folder, prompt, [])[:-1].log_softmax(-1)
    check_figures(got.prompt_logprobs[index], prompt[1:], expected, num_top)


@pytest.mark.parametrize(("kind", "run_ahead"), [("reference", 0), ("slots", 0), ("slots", 4)])
def test_figures_are_those_of_transformers(gqa_folder: Path, kind: str, run_ahead: int) -> None:
    """Chunks of at most 16 tokens, beside rows that do not ask and rows that decode."""
    engine = engine_for(gqa_folder, kind, run_ahead=run_ahead)
    got = run(engine, PROMPTS, PARAMS, arrivals=[0, 0, 2, 3, 4])
    assert set(got.prompt_logprobs) == {0, 1, 4}
    for index, num_top in ((0, 3), (1, 1), (4, 0)):
        check(gqa_folder, got, index, PROMPTS[index], num_top)
    plain = [TokenRules(**GREEDY), TokenRules(**GREEDY, presence_penalty=1.0), *[TokenRules(**GREEDY)] * 3]
    assert run(engine_for(gqa_folder, kind), PROMPTS, plain).token_ids == got.token_ids


@pytest.mark.parametrize("kind", ["reference", "slots"])
def test_f1_a_cached_prefix_leaves_the_list_complete(gqa_folder: Path, kind: str) -> None:
    """Case F1: the same 117 tokens twice, and once more by a request that does not ask: that one uses the cache."""
    prompt = random_tokens(117, seed=117)
    engine = engine_for(gqa_folder, kind, max_num_batched_tokens=50)
    asking = TokenRules(**GREEDY, prompt_logprobs=1)
    first, second = (run(engine, [prompt], asking) for _ in range(2))
    check(gqa_folder, first, 0, prompt, 1)
    assert [figure.rank for figure in second.prompt_logprobs[0]] == [f.rank for f in first.prompt_logprobs[0]]
    assert [figure.sampled for figure in second.prompt_logprobs[0]] == pytest.approx(
        [figure.sampled for figure in first.prompt_logprobs[0]], abs=1e-4
    )
    assert engine.stats().num_cached_prompt_tokens == 0
    plain = run(engine, [prompt], TokenRules(**GREEDY))
    assert engine.stats().num_cached_prompt_tokens == 116
    assert plain.token_ids == first.token_ids == second.token_ids


@pytest.mark.parametrize(("kind", "run_ahead"), [("reference", 0), ("slots", 2)])
def test_a_preempted_prompt_is_told_whole_and_its_output_stays(gqa_folder: Path, kind: str, run_ahead: int) -> None:
    """Preempted before its first token it begins anew; after it, it may come back through the cache and tells none."""
    prompts = [random_tokens(length, seed=length) for length in (9, 25, 17, 22)]
    params = TokenRules(**{**GREEDY, "max_tokens": 30}, prompt_logprobs=2)
    roomy = run(engine_for(gqa_folder, kind), prompts, params)
    tight = engine_for(gqa_folder, kind, num_gpu_blocks_override=18, run_ahead=run_ahead, admission_reserve=-10.0)
    got = run(tight, prompts, params)
    assert tight.stats().num_preemptions > 0
    assert got.token_ids == roomy.token_ids
    for index, prompt in enumerate(prompts):
        check(gqa_folder, got, index, prompt, 2)


def test_long_chunks_are_computed_in_slices(tmp_path: Path) -> None:
    """A chunk of more tokens than have logits at a time."""
    folder = write_checkpoint("llama-linear", tmp_path)
    engine = create_engine(config(str(folder), max_model_len=128, max_num_batched_tokens=512))
    assert TOKENS_AT_ONCE == 128
    prompts = [random_tokens(127, seed=1), random_tokens(100, seed=2)]
    got = run(engine, prompts, TokenRules(**{**GREEDY, "max_tokens": 1}, prompt_logprobs=2))
    for index, prompt in enumerate(prompts):
        check(folder, got, index, prompt, 2)


def test_more_figures_than_an_answer_may_carry_are_refused(gqa_folder: Path) -> None:
    engine = engine_for(gqa_folder, "reference")
    with pytest.raises(InvalidRequestError, match="prompt_logprobs must be between 0 and 20, got -1"):
        engine.make_request(1, np.array([5], np.int32), TokenRules(prompt_logprobs=-1))
    params = TokenRules(prompt_logprobs=20)
    params.check_prompt(MAX_PROMPT_LOGPROBS // 21)
    with pytest.raises(InvalidRequestError, match="are 131082 figures; at most 131072 are allowed"):
        params.check_prompt(MAX_PROMPT_LOGPROBS // 21 + 1)
    TokenRules().check_prompt(10**9)
