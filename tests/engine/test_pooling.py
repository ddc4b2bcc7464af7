"""Embeddings, classes and scores are transformers' own: alone, in chunks, beside streams, cached, preempted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine
from tests.engine.drive import Run, engine_for, run, take_pooled
from tests.models.tiny_checkpoints import random_tokens, write_checkpoint

LENGTHS = (1, 3, 4, 5, 16, 17, 37, 50)
PROMPTS = [random_tokens(length, seed=length) for length in LENGTHS]
LAST = TokenRules(seed=0, pooling=PoolingRules())
MEAN = TokenRules(seed=0, pooling=PoolingRules(pooling="mean"))
CLASSES = TokenRules(seed=0, pooling=PoolingRules(readout="classifier"))
HEAD = TokenRules(seed=0, pooling=PoolingRules(readout="head", token_ids=(11, 5)))
STREAM = TokenRules(seed=0, temperature=0.0, max_tokens=12, ignore_eos=True)
NUM_LABELS = 3
PLAIN: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}  # sdpa knows no softcap


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of Qwen3-Embedding and Qwen3-Reranker: heads of q and k are normed."""
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def qwen_with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a tokenizer of one letter a token, in which the tokens of a score are found."""
    folder = write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3-tokens"))
    letters = {chr(ord("a") + index): index for index in range(26)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


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
        return AutoModel.from_pretrained(folder, **PLAIN)(torch.tensor([prompt])).last_hidden_state[0]


def expected(folder: Path, prompt: Sequence[int], rules: TokenRules) -> list[float]:
    pooling = rules.pooling
    assert pooling is not None
    with torch.inference_mode():
        if pooling.readout == "classifier":
            model: Any = AutoModelForSequenceClassification.from_pretrained(folder, **PLAIN)
            return model(torch.tensor([prompt])).logits[0].tolist()
        if pooling.readout == "head":
            model = AutoModelForCausalLM.from_pretrained(folder, **PLAIN)
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


@pytest.mark.parametrize("name", ["granite", "gemma3", "olmo3", "glm4"])
def test_hidden_states_of_families_with_norms_and_scales_of_their_own(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path)
    rules = [LAST, MEAN] * 4
    check(folder, run(engine_for(folder, "slots", runner="pooling"), PROMPTS, rules), rules)


@pytest.mark.parametrize("kind", ["slots", "reference"])
def test_all_kinds_beside_streams_and_each_other(qwen_with_tokenizer: Path, kind: str) -> None:
    """Each kind of reading in one batch with streams, whose tokens are those that they have alone."""
    folder = qwen_with_tokenizer
    rules = [LAST, STREAM, MEAN, HEAD, STREAM, LAST, MEAN, HEAD]
    got = run(both(folder, kind, max_num_seqs=6), PROMPTS, rules, arrivals=[0, 0, 1, 1, 2, 5, 6, 6])
    check(folder, got, rules)
    alone = run(engine_for(folder, kind), [PROMPTS[1], PROMPTS[4]], STREAM)
    assert [got.token_ids[1], got.token_ids[4]] == [alone.token_ids[0], alone.token_ids[1]]


@pytest.mark.parametrize("run_ahead", [0, 3])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-bias", "mistral-window", "qwen3", "gemma2", "gpt-oss"])
def test_classifiers_of_several_families(name: str, run_ahead: int, tmp_path: Path) -> None:
    folder = classifier_folder(name, tmp_path)
    engine = engine_for(folder, "slots", run_ahead=run_ahead)
    assert engine.info.tasks.tasks == ("classify",)
    check(folder, run(engine, PROMPTS, CLASSES), [CLASSES] * len(PROMPTS))
    for rules, told in ((STREAM, "does not generate; it serves classify"), (LAST, "no part for 'hidden'")):
        with pytest.raises(InvalidRequestError, match=told):
            engine.make_request(1, np.array([5], np.int32), rules)


def test_a_cached_prefix_gives_the_same_numbers(qwen_with_tokenizer: Path) -> None:
    """A query and its documents: the blocks of the query are computed once, also where streams have left them."""
    folder = qwen_with_tokenizer
    query = random_tokens(24, seed=5)
    prompts = [query + random_tokens(length, seed=length) for length in (3, 9, 17, 4)]
    engine = both(folder)
    first = run(engine, prompts, HEAD)
    check(folder, first, [HEAD] * 4, prompts)
    assert engine.stats().num_cached_prompt_tokens >= 3 * 16
    again = run(engine, prompts, [LAST, HEAD, MEAN, STREAM])
    check(folder, again, [LAST, HEAD, MEAN, STREAM], prompts)
    before = engine.stats().num_cached_prompt_tokens
    run(engine, prompts, MEAN)
    assert engine.stats().num_cached_prompt_tokens == before, "a mean needs every token's state"


@pytest.mark.parametrize("changes", [{}, {"swap_space": 0.01}, {"enable_chunked_prefill": False}], ids=str)
def test_preempted_and_cancelled(qwen_with_tokenizer: Path, changes: dict[str, Any]) -> None:
    """Streams that outgrow a small cache put pooling requests back; one of these is cancelled on its way."""
    folder = qwen_with_tokenizer
    long = TokenRules(seed=0, temperature=0.0, max_tokens=40, ignore_eos=True)
    rules = [long, long, MEAN, long, LAST, MEAN, HEAD, LAST]
    prompts = [random_tokens(length, seed=length) for length in (9, 12, 57, 10, 63, 41, 64, 30)]
    settings = {"max_num_batched_tokens": 8, "num_gpu_blocks_override": 22, "max_num_seqs": 6, "run_ahead": 2}
    if changes.get("enable_chunked_prefill") is False:
        settings["max_num_batched_tokens"] = 64
    engine = both(folder, **{**settings, **changes})
    got = run(engine, prompts, rules, arrivals=[0, 0, 0, 0, 1, 2, 3, 4], cancels={5: 6})
    assert engine.stats().num_preemptions > 0
    kept = [index for index in range(len(rules)) if got.reasons[index] is not FinishReason.ABORT]
    assert len(kept) >= 7
    check(folder, _of(got, kept), [rules[index] for index in kept], [prompts[index] for index in kept])
    engine.scheduler.check_integrity()
    assert engine.stats().num_free_blocks == engine.info.num_blocks


@pytest.mark.parametrize("rules", [LAST, MEAN], ids=["last", "mean"])
def test_what_an_urgent_stream_puts_back_is_computed_again(qwen: Path, rules: TokenRules) -> None:
    """The vector's request gives its blocks away half way; a mean begins anew, the other with what is still cached."""
    engine = engine_for(
        qwen, "slots", runner="both", max_num_batched_tokens=8, num_gpu_blocks_override=16, swap_space=0.01
    )
    vector = engine.make_request(0, np.array(PROMPTS[7], np.int32), rules, SchedulingParams(priority=1))
    engine.add_request(vector)
    for _ in range(4):
        engine.step()
    urgent = engine.make_request(1, np.array(PROMPTS[6], np.int32), STREAM, SchedulingParams(priority=-1))
    engine.add_request(urgent)
    pooled: dict[int, list[float]] = {}
    while engine.has_unfinished():
        output = engine.step()
        if output is not None:
            take_pooled(output, pooled)
    assert (vector.num_preemptions, urgent.num_preemptions) == (1, 0)
    assert_equal(pooled[0], expected(qwen, PROMPTS[7], rules))
    assert engine.stats().num_free_blocks == 16


def _of(got: Run, kept: list[int]) -> Run:
    """The results of some of the prompts, counted anew."""
    return Run(
        {new: got.token_ids[old] for new, old in enumerate(kept)},
        {new: got.reasons[old] for new, old in enumerate(kept)},
        pooled={new: got.pooled[old] for new, old in enumerate(kept) if old in got.pooled},
    )


def test_a_text_may_fill_the_model_and_the_cache(qwen: Path) -> None:
    """There is no output for which a place would have to be left."""
    engine = engine_for(qwen, "slots", runner="pooling", max_model_len=40, num_gpu_blocks_override=10)
    prompt = random_tokens(40, seed=40)
    check(qwen, run(engine, [prompt], LAST), [LAST], [prompt])
    with pytest.raises(InvalidRequestError, match="the text has 41 tokens; the model takes at most 40"):
        engine.add_request(engine.make_request(1, np.array([*prompt, 5], np.int32), LAST))
    generating = engine_for(qwen, "slots", max_model_len=40, num_gpu_blocks_override=10)
    with pytest.raises(InvalidRequestError, match="at most 39 fit beside one output token"):
        generating.add_request(generating.make_request(1, np.array(prompt, np.int32), STREAM))


def test_numbers_that_are_not_finite_fail_their_request_alone(qwen: Path) -> None:
    engine = engine_for(qwen, "slots", runner="pooling")
    weight = engine.runner.model.embed_tokens.weight
    with torch.inference_mode():
        weight[7] = float("nan")
    got = run(engine, [[5, 7, 6], [5, 6]], LAST)
    assert got.reasons == {0: FinishReason.ERROR, 1: FinishReason.STOP}
    assert 0 not in got.pooled
    assert np.isfinite(got.pooled[1]).all()
    assert engine.stats().num_free_blocks == engine.info.num_blocks


def test_a_generating_model_has_no_embeddings_unless_asked(qwen: Path) -> None:
    engine = engine_for(qwen, "slots")
    with pytest.raises(InvalidRequestError, match="no part for 'hidden'"):
        engine.make_request(1, np.array([5], np.int32), LAST)
    assert engine.info.tasks.tasks == ()
