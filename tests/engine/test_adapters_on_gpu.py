"""Adapters on the GPU: the kernels in captured steps, beside the CPU's twins and beside PEFT's merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from cb_backend.contracts.token_rules import TokenRules
from tests.engine.adapted import adapted_engine, source_of
from tests.engine.drive import run
from tests.models.adapters import load_merged, modules_of, write_adapter
from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import random_tokens, write_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GREEDY = TokenRules(max_tokens=40, temperature=0.0, ignore_eos=True, seed=0)
CUDA = torch.device("cuda")


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, list[Path]]:
    folder = write_checkpoint("llama-gqa", tmp_path / "model")
    options: list[dict[str, Any]] = [{"r": 1}, {"r": 5, "lora_alpha": 10}, {"r": 8, "use_rslora": True}]
    return folder, [
        write_adapter(folder, tmp_path / str(seed), seed=seed, target_modules=modules_of("llama-gqa"), **given)
        for seed, given in enumerate(options)
    ]


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-bias", "phi3", "glm4", "gemma2", "qwen3"])
def test_kernels_compute_what_the_merged_model_does(name: str, tmp_path: Path) -> None:
    """In float32, in which nothing is rounded away."""
    folder = write_checkpoint(name, tmp_path / "model")
    adapter = write_adapter(folder, tmp_path / "adapter", r=5, lora_alpha=10, target_modules=modules_of(name))
    model = PagedModel(folder, backend="triton", device=CUDA, max_adapters=2, max_rank=8)
    model.load_adapter(1, adapter)
    model.adapter_of_slot[2] = 1
    prompts = [random_tokens(length, length) for length in (70, 33)]
    for slot, tokens in zip((0, 2), prompts, strict=True):
        model.start(slot, len(tokens))
    logits = model.step([], [(0, prompts[0]), (2, prompts[1])]).split([len(tokens) for tokens in prompts])
    for ours, tokens, own in zip(logits, prompts, (None, adapter), strict=True):
        assert (ours.cpu() - merged(folder, own, tokens)).abs().max() < 1e-3


@torch.inference_mode()
def merged(folder: Path, adapter: Path | None, tokens: list[int]) -> Tensor:
    found: Tensor = load_merged(folder, adapter)(torch.tensor([tokens])).logits[0]
    return found


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_captured_steps_follow_the_adapters_in_their_slots(
    settings: dict[str, Any], made: tuple[Path, list[Path]]
) -> None:
    """Other mixes, other contents of the slots, and none: answers of the CPU's twins, in float32."""
    folder, adapters = made
    prompts = [random_tokens(5 + 9 * index, index) for index in range(7)]
    usual = {"max_num_batched_tokens": 512, "max_model_len": 128, "max_loras": 2}
    engines = [
        adapted_engine(folder, **usual, **more)
        for more in ({"device": "cuda", "attention_backend": "triton", **settings}, {"device": "cpu"})
    ]
    for wanted in ((0, 1, None), (2, 0), (None,), (1, 1, 2), (0, 1, 2)):
        chosen = {index: wanted[index % len(wanted)] for index in range(len(prompts))}
        sources = {index: source_of(adapters[each]) for index, each in chosen.items() if each is not None}
        answers = [run(engine, prompts, GREEDY, adapters=sources).token_ids for engine in engines]
        assert answers[0] == answers[1]


def test_bfloat16_alone_and_among_others_is_the_same(made: tuple[Path, list[Path]]) -> None:
    """A row's answer does not depend on which adapters are beside it, as far as the rest of the step does not."""
    folder, adapters = made
    prompts = [random_tokens(20, index) for index in range(8)]
    settings = {"device": "cuda", "dtype": "bfloat16", "max_num_batched_tokens": 512, "max_model_len": 128}
    answers = []
    for others in ((1, 2), (2, 2)):
        engine = adapted_engine(folder, max_num_seqs=8, **settings)
        sources = {index: source_of(adapters[(0, *others)[index % 3]]) for index in range(8)}
        answers.append(run(engine, prompts, GREEDY, adapters=sources).token_ids)
    for index in (0, 3, 6):
        assert answers[0][index] == answers[1][index]


@pytest.mark.parametrize("max_num_batched_tokens", [512, 96])
def test_answers_of_500_tokens_through_graphs(max_num_batched_tokens: int, tmp_path: Path) -> None:
    """Long answers of base rows and three adapters together, which come and go: those of the CPU's twins, in float32.
    With small steps prompts are cut and computed beside rows of other adapters."""
    folder = write_checkpoint("llama-gqa", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    adapters = [
        write_adapter(folder, tmp_path / str(seed), seed=seed, r=rank, target_modules=modules_of("llama-gqa"))
        for seed, rank in enumerate((1, 5, 8))
    ]
    prompts = [random_tokens(40 + 31 * index, index) for index in range(9)]
    sources = {index: source_of(adapters[index % 4 - 1]) for index in range(len(prompts)) if index % 4}
    rules = [structs.replace(GREEDY, max_tokens=500 - 40 * index) for index in range(len(prompts))]
    settings = {"max_model_len": 1024, "max_loras": 2, "num_gpu_blocks_override": 600}
    answers = []
    for more in ({"device": "cuda", "attention_backend": "triton"}, {"device": "cpu"}):
        engine = adapted_engine(folder, max_num_batched_tokens=max_num_batched_tokens, **settings, **more)
        answers.append(run(engine, prompts, rules, arrivals=[20 * index for index in range(9)], adapters=sources))
        assert (
            engine.stats().adapters.num_loads > settings["max_loras"]
        )  # places were taken over while answers were under way
    assert answers[0].token_ids == answers[1].token_ids
    assert len(answers[0].token_ids[0]) == 500
