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

from cb_backend.contracts.token_rules import TokenRules
from tests.engine.adapted import adapted_engine
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


def check(name: str, made: Path, num_prompts: int = 24, slots: tuple[int, ...] = (-1, 0, 1, 2), **settings: Any) -> Any:
    """Run prompts, slot after slot of `slots`, and compare. Returns the engine."""
    folder, adapters = model_and_adapters(name, made)
    slot_of = {index: slots[(index + index // len(slots)) % len(slots)] for index in range(num_prompts)}
    engine, _ = adapted_engine(folder, list(adapters), slot_of, **settings)
    prompts = prompts_for(num_prompts)
    got = run(engine, prompts, GREEDY, arrivals=[index // 3 for index in range(num_prompts)])
    for index, prompt in enumerate(prompts):
        adapter = None if slot_of[index] < 0 else adapters[slot_of[index]]
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
    """All of one adapter: the same prompts again find their blocks, and go on from them as before."""
    folder, adapters = model_and_adapters("llama-gqa", made)
    engine, _ = adapted_engine(folder, list(adapters), dict.fromkeys(range(16), 2), enable_prefix_caching=True)
    prompts = prompts_for(8) * 2
    got = run(engine, prompts, GREEDY, arrivals=[0] * 8 + [60] * 8)
    assert engine.stats().num_cached_prompt_tokens > 0
    for index, prompt in enumerate(prompts):
        assert got.token_ids[index] == greedy(folder, adapters[2], prompt, GREEDY.max_tokens)


def test_an_answer_of_500_tokens(made: Path) -> None:
    folder = write_checkpoint("llama-gqa", made / "long")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 1024}))
    adapter = write_adapter(folder, made / "long-0", seed=5, target_modules=modules_of("llama-gqa"), r=8, lora_alpha=8)
    engine, _ = adapted_engine(folder, [adapter], {0: 0, 2: 0})
    params = TokenRules(max_tokens=500, temperature=0.0, ignore_eos=True, seed=0)
    prompts = prompts_for(3)
    got = run(engine, prompts, params)
    for index, prompt in enumerate(prompts):
        assert got.token_ids[index] == greedy(folder, None if index == 1 else adapter, prompt, 500)


def test_an_adapter_in_a_slot_that_another_had(made: Path) -> None:
    """Only what comes after the load goes through it."""
    folder, adapters = model_and_adapters("llama-gqa", made)
    engine, given = adapted_engine(folder, [adapters[0]], dict.fromkeys(range(8), 0))
    for adapter in (adapters[0], adapters[2], adapters[0]):
        given.reload([adapter])
        got = run(engine, prompts_for(8), GREEDY)
        for index, prompt in enumerate(prompts_for(8)):
            assert got.token_ids[index] == greedy(folder, adapter, prompt, GREEDY.max_tokens)
