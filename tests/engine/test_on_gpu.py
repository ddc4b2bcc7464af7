"""On a GPU: graphs, run-ahead and the Triton kernels change nothing. The twins, run eagerly, are the reference."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from cb_backend.engine.llm_engine import create_engine
from cb_backend.sampling_params import SamplingParams
from tests.engine.drive import config, run
from tests.engine.test_equal_to_transformers import prompts_for
from tests.engine.test_prompt_logprobs import check as check_prompt
from tests.engine.test_slot_runner import APART
from tests.models.tiny_checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.0, seed=0, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.8, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.7, top_k=9, top_p=0.9, seed=6, stop_token_ids=(7, 11), min_tokens=6),
    SamplingParams(max_tokens=20, temperature=1.0, min_p=0.05, seed=7),
    SamplingParams(max_tokens=20, temperature=0.0, seed=8),
    SamplingParams(max_tokens=9, temperature=0.9, seed=9),
    SamplingParams(max_tokens=3, temperature=0.0, seed=10),
]


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "mistral-window", "llama-longrope"])
@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"run_ahead": 0}, {"run_ahead": 4}, {"block_size": 16}])
def test_same_tokens_in_float32(name: str, settings: dict[str, object], tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path)
    common = {
        "device": "cuda",
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 200,
        "block_size": 4,
    }
    reference = create_engine(config(str(folder), **common, attention_backend="torch", enforce_eager=True, run_ahead=0))
    prompts = prompts_for(reference.info.vocab_size)
    expected = run(reference, prompts, PARAMS)
    engine = create_engine(config(str(folder), **{**common, **settings}))
    got = run(engine, prompts, PARAMS, arrivals=[0, 1, 1, 4, 4, 6, 12])
    assert got.token_ids == expected.token_ids
    assert got.reasons == expected.reasons
    assert engine.stats().num_free_blocks == engine.info.num_blocks


@pytest.mark.parametrize("run_ahead", [0, 4])
def test_j3_f1_rules_and_figures_in_float32(run_ahead: int, tmp_path: Path) -> None:
    """Rules, log-probabilities and those of prompts: of the twins run eagerly, and of transformers."""
    folder = write_checkpoint("llama-gqa", tmp_path)
    common = {"device": "cuda", "max_num_batched_tokens": 64, "max_num_seqs": 8, "num_gpu_blocks_override": 200}
    eager = {"attention_backend": "torch", "enforce_eager": True, "run_ahead": 0}
    reference = create_engine(config(str(folder), **common, **eager))
    prompts = prompts_for(reference.info.vocab_size)
    params = [msgspec.structs.replace(each, prompt_logprobs=index % 4) for index, each in enumerate(APART)]
    expected = run(reference, prompts, params)
    engine = create_engine(config(str(folder), **common, run_ahead=run_ahead))
    got = run(engine, prompts, params, arrivals=[0, 1, 1, 4, 4, 6, 12])
    assert got.token_ids == expected.token_ids
    assert set(got.logprobs) == set(expected.logprobs) == {0, 1, 6}
    for index, figures in expected.logprobs.items():
        for mine, theirs in zip(got.logprobs[index], figures, strict=True):
            assert mine.rank == theirs.rank
            assert mine.sampled == pytest.approx(theirs.sampled, abs=1e-3)
    for index, prompt in enumerate(prompts):
        if len(prompt) > 1:
            check_prompt(folder, got, index, prompt, index % 4)
    assert engine.stats().num_free_blocks == engine.info.num_blocks
