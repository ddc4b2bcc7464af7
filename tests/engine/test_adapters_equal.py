"""Greedy answers of an engine with adapters are those of PEFT's merged models in transformers, token by token.

Rows of the base model and of three adapters are in one batch, whatever cuts the prompts, interrupts them, or is cached.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cb_backend.cli.timelines.steps import from_dump
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine
from tests.engine.adapted import adapted_engine, source_of
from tests.engine.drive import run
from tests.models.adapters import load_merged, modules_of, write_adapter
from tests.models.tiny_checkpoints import write_checkpoint

BASES = ["llama-gqa", "qwen2-bias", "phi3", "gemma2"]
GREEDY = TokenRules(max_tokens=12, temperature=0.0, ignore_eos=True, seed=0)
LENGTHS = (1, 4, 5, 15, 16, 17, 23, 40)
ADAPTERS: list[dict[str, Any]] = [
    {"r": 1, "lora_alpha": 2},
    {"r": 3, "lora_alpha": 6, "use_rslora": True, "layers_to_transform": [1]},
    {"r": 8, "lora_alpha": 4, "rank_pattern": {"o_proj": 2, r"layers\.1\.mlp\.down_proj": 5},
     "alpha_pattern": {"down_proj": 9}},
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@cache
def model_and_adapters(name: str, made: Path) -> tuple[Path, tuple[Path, ...]]:
    folder = write_checkpoint(name, made / name)
    adapters = (
        write_adapter(folder, made / f"{name}-{seed}", seed=seed, target_modules=modules_of(name), **options)
        for seed, options in enumerate(ADAPTERS)
    )
    return folder, tuple(adapters)


@cache
def greedy(folder: Path, adapter: Path | None, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """transformers' continuation, alone, with its own cache."""
    model, answer, tokens, past = merged(folder, adapter), list[int](), list(prompt), None
    with torch.inference_mode():
        for _ in range(num_tokens):
            output = model(torch.tensor([tokens]), past_key_values=past, use_cache=True)
            past, tokens = output.past_key_values, [int(output.logits[0, -1].argmax())]
            answer += tokens
    return answer


@cache
def merged(folder: Path, adapter: Path | None) -> torch.nn.Module:
    return load_merged(folder, adapter)


def prompts_for(count: int, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(count)
    return [tuple(rng.integers(3, 97, lengths[index % len(lengths)]).tolist()) for index in range(count)]


def check(name: str, made: Path, num_prompts: int = 24, **settings: Any) -> LLMEngine:
    """Run prompts of the base model and of every adapter in turn, and compare. Returns the engine."""
    folder, adapters = model_and_adapters(name, made)
    choices = (None, *adapters)
    chosen = [choices[(index + index // len(choices)) % len(choices)] for index in range(num_prompts)]
    engine, prompts = adapted_engine(folder, **settings), prompts_for(num_prompts)
    sources = {index: source_of(adapter) for index, adapter in enumerate(chosen) if adapter is not None}
    got = run(engine, prompts, GREEDY, arrivals=[index // 3 for index in range(num_prompts)], adapters=sources)
    for index, (prompt, adapter) in enumerate(zip(prompts, chosen, strict=True)):
        assert got.token_ids[index] == greedy(folder, adapter, prompt, GREEDY.max_tokens), (
            f"prompt {index} of {adapter}"
        )
    engine.scheduler.check_integrity()
    return engine


@pytest.mark.parametrize("name", BASES)
def test_rows_of_the_base_and_of_three_adapters_in_one_batch(name: str, made: Path) -> None:
    check(name, made)


@pytest.mark.parametrize("kind", ["slots", "reference"])
@pytest.mark.parametrize("budget", [5, 7, 12])
def test_prompts_in_chunks(budget: int, kind: str, made: Path) -> None:
    """Of one token beside four decode rows, of seven at most, and about a block."""
    check("llama-gqa", made, kind=kind, max_num_batched_tokens=budget)


@pytest.mark.parametrize("name", BASES[:2])
def test_requests_that_are_preempted_go_on_with_their_adapter(name: str, made: Path) -> None:
    engine = check(name, made, num_gpu_blocks_override=18, max_num_seqs=4)
    assert engine.stats().num_preemptions > 0


def test_prefixes_that_are_cached(made: Path) -> None:
    """The same prompts again find their blocks, those that went through the same adapter, and go on from them."""
    folder, adapters = model_and_adapters("llama-gqa", made)
    engine, prompts = adapted_engine(folder), prompts_for(8, (17, 23, 40))
    cached = []
    for adapter in (adapters[2], adapters[2], None, adapters[0], adapters[2]):
        before = engine.stats().num_cached_prompt_tokens
        sources = {} if adapter is None else dict.fromkeys(range(8), source_of(adapter))
        got = run(engine, prompts, GREEDY, adapters=sources)
        cached.append(engine.stats().num_cached_prompt_tokens - before)
        for index, prompt in enumerate(prompts):
            assert got.token_ids[index] == greedy(folder, adapter, prompt, GREEDY.max_tokens)
    assert [count > 0 for count in cached] == [False, True, False, False, True]


def test_an_answer_of_500_tokens(made: Path) -> None:
    folder = write_checkpoint("llama-gqa", made / "long")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 1024}))
    adapter = write_adapter(folder, made / "long-0", seed=5, target_modules=modules_of("llama-gqa"), r=8, lora_alpha=8)
    engine, prompts = adapted_engine(folder, num_gpu_blocks_override=600), prompts_for(3)
    params = TokenRules(max_tokens=500, temperature=0.0, ignore_eos=True, seed=0)
    got = run(engine, prompts, params, adapters=dict.fromkeys((0, 2), source_of(adapter)))
    for index, prompt in enumerate(prompts):
        assert got.token_ids[index] == greedy(folder, None if index == 1 else adapter, prompt, 500)


@pytest.mark.parametrize("kind", ["slots", "reference"])
@pytest.mark.parametrize("max_loras", [1, 2])
def test_more_adapters_than_slots(max_loras: int, kind: str, made: Path) -> None:
    """They take turns; rows of the base model need no slot."""
    engine = check("llama-gqa", made, max_loras=max_loras, kind=kind)
    stats = engine.stats().adapters
    assert stats is not None
    assert stats.num_resident == max_loras
    assert stats.num_loads >= len(ADAPTERS)
    log = from_dump(engine.log.dump(10_000))
    assert sum(len(step.adapter_loads) for step in log.steps) == stats.num_loads
    assert {log.header.adapters[request_id] for step in log.steps for request_id in step.adapter_loads} == {
        f"llama-gqa-{seed}" for seed in range(len(ADAPTERS))
    }
