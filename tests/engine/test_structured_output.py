"""Structured output on both runners: always valid, and the same alone, in company, preempted and run ahead."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.structured_output import StructuredOutput
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.runner.logits_rules import NO_TOKEN_LEFT
from cb_backend.kv_cache.swap import BlockSwapper
from tests.engine.drive import Run
from tests.engine.structured import (
    ALL_PARAMS,
    GRAMMARS,
    PROMPTS,
    Texts,
    check_texts,
    engine_for,
    is_valid,
    params,
    run_to_end,
)


@pytest.fixture(scope="module")
def alone(folder: Path, texts: Texts) -> list[list[int]]:
    """Each request's tokens when nothing runs beside it, on the reference runner; every one valid."""
    engine = engine_for(folder, "reference")
    token_ids = []
    for prompt, own in zip(PROMPTS, ALL_PARAMS, strict=True):
        got = run_to_end(engine, [prompt], [own])
        token_ids.append(got.token_ids[0])
        if own.structured_output is not None:
            assert got.reasons[0] is FinishReason.STOP
    check_texts(texts, token_ids)
    return token_ids


@pytest.fixture(scope="module")
def slots_engine(folder: Path) -> LLMEngine:
    return engine_for(folder, "slots", run_ahead=2)


def tokens_of(got: Run) -> list[list[int]]:
    return [got.token_ids[index] for index in sorted(got.token_ids)]


@pytest.mark.parametrize(("kind", "run_ahead"), [("reference", 0), *(("slots", n) for n in (0, 1, 4))])
def test_in_company_as_alone(folder: Path, alone: list[list[int]], kind: str, run_ahead: int) -> None:
    """Joins and leaves in many steps, prompts in chunks; rows without a grammar are untouched. Then cached prefixes."""
    engine = engine_for(folder, kind, run_ahead=run_ahead)
    got = run_to_end(engine, PROMPTS, ALL_PARAMS, arrivals=[index // 2 for index in range(len(PROMPTS))])
    assert tokens_of(got) == alone
    assert tokens_of(run_to_end(engine, PROMPTS[:4], ALL_PARAMS[:4])) == alone[:4]
    assert engine.stats().num_cached_prompt_tokens > 0


@pytest.mark.parametrize(
    ("kind", "run_ahead", "swap_space"),
    [("reference", 0, 0.0), ("slots", 1, 0.0), ("slots", 1, 0.01), ("slots", 4, 0.0)],
)
def test_preempted_as_alone(folder: Path, alone: list[list[int]], kind: str, run_ahead: int, swap_space: float) -> None:
    """Preempted in the middle of a grammar, then computed again or swapped in."""
    engine = engine_for(folder, kind, run_ahead=run_ahead, num_gpu_blocks_override=32, swap_space=swap_space)
    if swap_space:
        engine.scheduler._swap.fixed_cost_tokens = 0  # these requests are short
        engine.runner.swapper = BlockSwapper(engine.runner.storage, engine.info.num_host_blocks)  # type: ignore[attr-defined]
    assert tokens_of(run_to_end(engine, PROMPTS, ALL_PARAMS)) == alone
    assert engine.stats().num_preemptions > 0
    assert (engine.stats().num_swapped_in > 0) == (swap_space > 0)


def test_guides_go_with_their_requests(folder: Path) -> None:
    """Cancelled, finished or failed: nobody keeps a guide, whoever still has the slot."""
    engine = engine_for(folder, "slots", run_ahead=2)
    endless = StructuredOutput(kind="regex", text=r"\d{200}")  # no draw ends it before it is cancelled
    request = engine.make_request(1, np.array(PROMPTS[0], np.int32), params(endless, seed=1))
    engine.add_request(request)
    while request.guide is None:
        engine.release_held()
    for _ in range(6):
        engine.step()
    guide = weakref.ref(request.guide)
    assert guide() is not None
    engine.cancel(1)
    del request
    while engine.has_unfinished():
        engine.step()
    gc.collect()
    assert guide() is None


@pytest.mark.parametrize(
    "rules",
    [
        {"min_tokens": 60},
        {"ignore_eos": True},
        {"stop_token_ids": (0,)},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"logit_bias": {0: 100.0}},
        {"logit_bias": {0: -100.0}},
        {"logprobs": 3},
        {"top_k": 3},
        {"top_p": 0.5, "min_p": 0.1},
        {"bad_words_token_ids": ((0,),)},
    ],
)
def test_beside_other_rules(folder: Path, texts: Texts, rules: dict[str, Any], slots_engine: LLMEngine) -> None:
    """The end comes when the grammar is complete and not before it accepts, whatever else is asked for."""
    names = ["regex", "choice", "lark"]
    got = run_to_end(slots_engine, PROMPTS[:3], [params(GRAMMARS[name], **rules) for name in names])
    for index, name in enumerate(names):
        text = texts.of(got.token_ids[index])
        assert got.reasons[index] is FinishReason.STOP, (name, got.failures)
        assert is_valid(name, text), (name, text)


@pytest.mark.parametrize("kind", ["reference", "slots"])
def test_ignore_eos_ends_where_nothing_else_is_allowed(folder: Path, texts: Texts, kind: str) -> None:
    regex = StructuredOutput(kind="regex", text="a{2,9}")
    engine = engine_for(folder, kind)
    bias = {"logit_bias": {0: 100.0}, "temperature": 0.0}
    got = run_to_end(engine, PROMPTS[:2], [params(regex, **bias), params(regex, ignore_eos=True, **bias)])
    assert texts.of(got.token_ids[0]) == "aa"
    assert texts.of(got.token_ids[1]) == "a" * 9
    assert set(got.reasons.values()) == {FinishReason.STOP}


@pytest.mark.parametrize("kind", ["reference", "slots"])
def test_an_empty_intersection_ends_its_own_request_with_the_reason(
    folder: Path, alone: list[list[int]], kind: str
) -> None:
    engine = engine_for(folder, kind, run_ahead=1)
    bad = params(GRAMMARS["regex"], allowed_token_ids=(70, 71))
    got = run_to_end(engine, [*PROMPTS[:5], PROMPTS[0], *PROMPTS[10:]], [*ALL_PARAMS[:5], bad, *ALL_PARAMS[10:]])
    assert got.reasons[5] is FinishReason.ERROR
    assert got.failures[5] == NO_TOKEN_LEFT
    assert [got.token_ids[i] for i in (0, 1, 2, 3, 4, 6, 7)] == [*alone[:5], *alone[10:]]


def test_output_cut_by_max_tokens_ends_by_length(folder: Path, texts: Texts) -> None:
    got = run_to_end(engine_for(folder, "slots"), PROMPTS[:1], [params(GRAMMARS["json"], max_tokens=3)])
    assert got.reasons[0] is FinishReason.LENGTH
    assert json.dumps({"name": ""}).startswith(texts.of(got.token_ids[0])[:5])
