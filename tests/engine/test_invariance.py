"""A request's tokens do not depend on company, order, block size, chunk size, cache hits, preemption or run-ahead.

Each example draws a whole setting; the expectation is each request run alone, one prompt in one step, no prefix cache.
Counters over all examples prove that the settings did what they are for.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from tests.engine.drive import Run, config, run
from tests.models.tiny_checkpoints import write_checkpoint

BLOCK_SIZES = (1, 4, 16)
MAX_LEN = 48
EXAMPLES = 60
seen: Counter[str] = Counter()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, LLMEngine]:
    folder = write_checkpoint("llama-gqa", tmp_path_factory.mktemp("tiny"))
    return {
        block_size: create_engine(
            config(
                str(folder),
                block_size=block_size,
                num_gpu_blocks_override=9 * MAX_LEN // block_size,
                max_model_len=MAX_LEN,
                max_num_seqs=8,
            )
        )
        for block_size in BLOCK_SIZES
    }


def _fresh(engine: LLMEngine, num_blocks: int | None = None, **changes: object) -> LLMEngine:
    """A new scheduler and an empty prefix cache over the same weights; fewer blocks if asked for."""
    info = engine.info if num_blocks is None else msgspec.structs.replace(engine.info, num_blocks=num_blocks)
    return LLMEngine(dataclasses.replace(engine.config, **changes), engine.runner, info)  # type: ignore[arg-type]


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[list[int], TokenRules]]:
    """Up to 8 requests; prompts often share a beginning, lengths lie around block borders."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shared = rng.integers(3, 97, 33).tolist()
    out = []
    for index in range(draw(st.integers(1, 8))):
        prefix = shared[: draw(st.sampled_from((0, 0, 1, 4, 15, 16, 17, 32, 33)))]
        own = rng.integers(3, 97, draw(st.sampled_from((1, 2, 3, 5)))).tolist()
        is_greedy = draw(st.booleans())
        params = TokenRules(
            max_tokens=draw(st.sampled_from((1, 2, 4, 9, 16))),
            temperature=0.0 if is_greedy else 0.9,
            top_k=draw(st.sampled_from((0, 20))),
            seed=index,
            ignore_eos=draw(st.booleans()),
        )
        out.append((prefix + own, params))
    return out


@seed(9)  # what is drawn must not change with the text of this file
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    batch=requests(),
    block_size=st.sampled_from(BLOCK_SIZES),
    budget=st.sampled_from((8, 9, 16, 48, 512)),
    run_ahead=st.sampled_from((0, 1, 4)),
    is_caching=st.booleans(),
    is_tight=st.booleans(),
    gaps=st.lists(st.integers(0, 6), min_size=8, max_size=8),
    repeat=st.booleans(),
)
def test_tokens_do_not_depend_on_the_batch(
    engines: dict[int, LLMEngine],
    batch: list[tuple[list[int], TokenRules]],
    block_size: int,
    budget: int,
    run_ahead: int,
    is_caching: bool,
    is_tight: bool,
    gaps: list[int],
    repeat: bool,
) -> None:
    prompts = [prompt for prompt, _ in batch]
    params = [params for _, params in batch]
    expected = _alone(engines[16], prompts, params)
    engine = engines[block_size]
    # Tight: room for the longest request alone and little more, so that company means preemption.
    num_blocks = -(-MAX_LEN // block_size) + 1 if is_tight else None
    engine = _fresh(
        engine,
        num_blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=is_caching,
        run_ahead=run_ahead,
    )
    arrivals = np.cumsum(gaps[: len(prompts)]).tolist()
    for _ in range(1 + repeat):  # the second time the cache is warm
        got = run(engine, prompts, params, arrivals=arrivals)
        assert got.token_ids == expected.token_ids
        assert got.reasons == expected.reasons
        engine.scheduler.check_integrity()
    stats = engine.stats()
    assert stats.num_free_blocks == engine.info.num_blocks
    seen["preemptions"] += stats.num_preemptions
    seen["cached tokens"] += stats.num_cached_prompt_tokens
    seen["evictions"] += stats.num_evicted_blocks
    seen["chunked prompts"] += sum(len(prompt) > budget for prompt in prompts)


def _alone(engine: LLMEngine, prompts: list[list[int]], params: list[TokenRules]) -> Run:
    out = Run()
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        alone = run(_fresh(engine, enable_prefix_caching=False, run_ahead=0), [prompt], param)
        out.token_ids[index], out.reasons[index] = alone.token_ids[0], alone.reasons[0]
    return out


def test_the_examples_did_what_they_are_for() -> None:
    """Runs after the test above; a run of nothing but easy settings would prove nothing."""
    assert seen["preemptions"] >= 10, seen
    assert seen["cached tokens"] >= 200, seen
    assert seen["evictions"] >= 10, seen
    assert seen["chunked prompts"] >= 10, seen


def test_seeded_sampling_does_not_see_neighbours(engines: dict[int, LLMEngine]) -> None:
    """Cases G1 and G3: alone, and beside 1 and 7 others; two equal requests give equal texts."""
    params = TokenRules(max_tokens=16, temperature=0.8, seed=42, ignore_eos=True)
    prompt = [5, 6, 7, 8, 9]
    alone = run(_fresh(engines[4]), [prompt], params).token_ids[0]
    for num_neighbours in (1, 7):
        others = [TokenRules(max_tokens=16, temperature=1.0, seed=100 + n) for n in range(num_neighbours)]
        got = run(_fresh(engines[4]), [prompt] * (1 + num_neighbours), [params, *others])
        assert got.token_ids[0] == alone
    twins = run(_fresh(engines[4]), [prompt, prompt], params, arrivals=[0, 3])
    assert twins.token_ids[0] == twins.token_ids[1] == alone
    different = run(_fresh(engines[4]), [prompt], msgspec.structs.replace(params, seed=43)).token_ids[0]
    assert different != alone
