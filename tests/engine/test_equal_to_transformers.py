"""Greedy answers of the whole engine (scheduler, cache, chunks, sampler) are transformers' own, token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cb_backend.engine.llm_engine import create_engine
from cb_backend.engine.model_runner import ModelRunner
from cb_backend.engine.slot_runner import SlotRunner
from cb_backend.request import FinishReason
from cb_backend.sampling_params import SamplingParams
from tests.engine.drive import config, run
from tests.models.tiny_checkpoints import CONFIGS, load_reference, write_checkpoint

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, seed=0)
# Around the block (4) and chunk (16) borders, and over the pretraining context of the scaled ropes (16).
LENGTHS = (1, 4, 5, 15, 16, 17, 40)


def prompts_for(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(len(lengths))
    return [rng.integers(3, vocab_size, length).tolist() for length in lengths]


def reference(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """transformers' greedy continuation of each prompt, alone, with its own cache."""
    outputs = []
    for prompt in prompts:
        model = load_reference(folder)  # anew: transformers' dynamic rope remembers the longest prompt it has seen
        model.generation_config.eos_token_id = None
        with torch.inference_mode():
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        outputs.append(ids[0, len(prompt) :].tolist())
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


@pytest.mark.parametrize("run_ahead", [0, 1, 4])
@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "llama-longrope", "llama-dynamic", "mistral-window"])
def test_slot_runner_equals_reference_runner(name: str, run_ahead: int, tmp_path: Path) -> None:
    """The GPU's way of running a step, on the CPU: state by slot, nothing read back before the next launch."""
    folder = write_checkpoint(name, tmp_path)
    settings = config(
        str(folder),
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        num_gpu_blocks_override=40,
        run_ahead=run_ahead,
    )
    engine = create_engine(settings)
    prompts = prompts_for(engine.info.vocab_size)
    params = [
        SamplingParams(max_tokens=20, temperature=0.0, seed=0, stop_token_ids=(7, 11), min_tokens=6),
        SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.7, top_k=9, top_p=0.9, seed=2**64 - 1, ignore_eos=True),
        GREEDY,
        SamplingParams(max_tokens=20, temperature=1.3, min_p=0.05, seed=7, stop_token_ids=tuple(range(40, 60))),
        GREEDY,
        SamplingParams(max_tokens=3, temperature=0.0, seed=0),
    ]
    expected = run(engine, prompts, params)
    reference_runner = engine.runner
    assert isinstance(reference_runner, ModelRunner)
    slot_runner = SlotRunner(
        reference_runner.model,
        reference_runner.ops,
        reference_runner.rotary,
        reference_runner.storage,
        settings.max_num_seqs,
        engine.info.max_model_len,
    )
    other = create_engine(settings)
    other.runner = slot_runner
    got = run(other, prompts, params, arrivals=[0, 1, 1, 4, 4, 6, 12])
    assert got.token_ids == expected.token_ids
    assert got.reasons == expected.reasons
    assert other.stats().num_free_blocks == other.info.num_blocks
