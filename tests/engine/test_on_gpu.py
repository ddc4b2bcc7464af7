"""On a GPU: graphs, run-ahead and the Triton kernels change nothing. The twins, run eagerly, are the reference."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import create_engine
from cb_backend.engine.runner import cuda_warm_up
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.runner.step_buffers import StepBuffers
from cb_backend.engine.runner.step_graphs import Replayable
from cb_backend.engine.step_shapes import StepShape
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
    TokenRules(max_tokens=20, temperature=0.0, seed=0, ignore_eos=True),
    TokenRules(max_tokens=20, temperature=0.8, seed=5, ignore_eos=True),
    TokenRules(max_tokens=20, temperature=0.7, top_k=9, top_p=0.9, seed=6, stop_token_ids=(7, 11), min_tokens=6),
    TokenRules(max_tokens=20, temperature=1.0, min_p=0.05, seed=7),
    TokenRules(max_tokens=20, temperature=0.0, seed=8),
    TokenRules(max_tokens=9, temperature=0.9, seed=9),
    TokenRules(max_tokens=3, temperature=0.0, seed=10),
]


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "mistral-window", "llama-longrope", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"run_ahead": 0}, {"run_ahead": 4}, {"block_size": 16}])
def test_same_tokens_in_float32(name: str, settings: dict[str, object], tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path)
    common = {
        "device": "cuda",
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 200,
        "block_size": 4,
        "disable_hybrid_kv_cache_manager": False,
    }
    reference = create_engine(config(str(folder), **common, attention_backend="torch", enforce_eager=True, run_ahead=0))
    prompts = prompts_for(reference.info.vocab_size)
    expected = run(reference, prompts, PARAMS)
    engine = create_engine(config(str(folder), **{**common, **settings}))
    got = run(engine, prompts, PARAMS, arrivals=[0, 1, 1, 4, 4, 6, 12])
    assert got.token_ids == expected.token_ids
    assert got.reasons == expected.reasons
    assert engine.stats().num_free_blocks == engine.info.num_blocks


def test_graphs_of_large_full_steps_give_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few long prompts and of many short ones, beside a changing number of decode rows."""
    common = {
        "device": "cuda", "max_model_len": 512, "max_num_batched_tokens": 4096, "max_num_seqs": 48,
        "num_gpu_blocks_override": 4000, "enable_prefix_caching": False,
    }  # fmt: skip
    monkeypatch.setattr(cuda_warm_up, "_is_launch_bound", lambda runner, shape: True)
    rng = np.random.default_rng(1)
    eager = create_engine(config(str(folder), **common, enforce_eager=True, run_ahead=0))
    lengths = [*rng.integers(250, 500, 60), *rng.integers(100, 250, 60)]
    prompts = [rng.integers(3, eager.info.vocab_size, length).tolist() for length in lengths]
    params = [msgspec.structs.replace(PARAMS[index % 2], max_tokens=1 + index % 4) for index in range(len(prompts))]
    expected = run(eager, prompts, params)
    engine = create_engine(config(str(folder), **common))
    runner = engine.runner
    assert isinstance(runner, SlotRunner)
    find, used = runner.graphs.find, set[StepShape]()

    def find_and_record(*step: int) -> tuple[Replayable, StepBuffers] | None:
        found = find(*step)
        used.update(() if found is None else (found[1].shape,))
        return found

    monkeypatch.setattr(runner.graphs, "find", find_and_record)
    assert run(engine, prompts, params).token_ids == expected.token_ids
    assert sum(shape.is_large for shape in used) >= 2


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
