"""Greedy answers of the whole engine (scheduler, cache, chunks, sampler) are transformers' own, token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import create_engine
from tests.engine.drive import config, run
from tests.models.tiny_checkpoints import CONFIGS, load_reference, write_checkpoint

GREEDY = TokenRules(max_tokens=20, temperature=0.0, ignore_eos=True, seed=0)
# Around the block (4) and chunk (16) borders, and over the pretraining context of the scaled ropes (16).
LENGTHS = (1, 4, 5, 15, 16, 17, 40)


def prompts_for(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(len(lengths))
    return [rng.integers(3, vocab_size, length).tolist() for length in lengths]


def reference(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """transformers' greedy continuation of each prompt, alone, with its own cache.

    Step by step: `generate` would throw the cache of a phi3 away where its long rope begins, and compute it anew.
    """
    outputs = []
    for prompt in prompts:
        model = load_reference(folder)  # anew: transformers' dynamic rope remembers the longest prompt it has seen
        answer: list[int] = []
        cache, tokens = None, prompt
        with torch.inference_mode():
            for _ in range(num_tokens):
                output = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
                cache, tokens = output.past_key_values, [int(output.logits[0, -1].argmax())]
                answer += tokens
        outputs.append(answer)
    return outputs


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_equals_transformers(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path)
    engine = create_engine(
        config(str(folder), block_size=4, max_num_batched_tokens=16, max_num_seqs=5, kv_cache_memory_bytes=1 << 22)
    )
    prompts = prompts_for(engine.info.vocab_size)
    got = run(engine, prompts, GREEDY, arrivals=[0, 0, 3, 3, 5, 9, 9])
    assert [got.token_ids[index] for index in range(len(prompts))] == reference(folder, prompts, GREEDY.max_tokens)
    assert set(got.reasons.values()) == {FinishReason.LENGTH}
    engine.scheduler.check_integrity()
    assert engine.stats().num_free_blocks == engine.info.num_blocks
