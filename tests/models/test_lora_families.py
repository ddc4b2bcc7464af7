"""Every family with adapters computes what PEFT's merged model computes, rows of several adapters in one step."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.kernels.launch import IS_INTERPRETING
from tests.models.adapters import load_merged, modules_of, write_adapter
from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import random_tokens, write_checkpoint

# One checkpoint of each form: biases, fused matrices, norms around blocks, heads turned by neighbours, windows.
FAMILIES = [
    "llama-gqa", "llama-biases", "mistral-window", "qwen2-bias", "qwen3", "phi3", "phi3-partial", "glm4", "granite",
    "smollm3", "ministral", "olmo2", "olmo3", "exaone4", "gemma2", "gemma3", "ministral3",
]  # fmt: skip
# Adapters of attention, and in qwen2-moe of layers without experts and of the expert that all tokens go through.
WITH_EXPERTS = ["qwen3-moe", "qwen2-moe", "glm4-moe", "gpt-oss", "granitemoe"]
ADAPTERS: list[dict[str, Any]] = [
    {"r": 3, "lora_alpha": 6},
    {"r": 8, "lora_alpha": 8, "use_rslora": True},
]


def reference(folder: Path, adapter: Path | None, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return load_merged(folder, adapter)(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", FAMILIES + WITH_EXPERTS)
def test_rows_of_several_adapters_are_the_merged_models(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path / "model")
    adapters: list[Path | None] = [
        write_adapter(folder, tmp_path / str(seed), seed=seed, target_modules=modules_of(name), **options)
        for seed, options in enumerate(ADAPTERS)
    ]
    model = PagedModel(folder, num_slots=3, max_adapters=2, max_rank=8)
    prompts = [random_tokens(length, seed) for seed, length in enumerate((11, 17, 6))]
    for slot, adapter in enumerate(adapters):
        assert adapter is not None
        model.load_adapter(slot, adapter)
    model.adapter_of_slot[:2] = torch.tensor([1, 0])
    got = run(model, prompts)
    for logits, tokens, adapter in zip(got, prompts, (adapters[1], adapters[0], None), strict=True):
        assert (logits - reference(folder, adapter, tokens)).abs().max() < 1e-4


def test_the_kernels_compute_the_same(tmp_path: Path) -> None:
    """Of all ops those of triton, interpreted where there is no GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert device.type == "cuda" or IS_INTERPRETING, "the kernels cannot run"
    folder = write_checkpoint("llama-gqa", tmp_path / "model")
    options: dict[str, Any] = {"target_modules": modules_of("llama-gqa"), "r": 5}
    adapters = [write_adapter(folder, tmp_path / str(seed), seed=seed, **options) for seed in range(2)]
    model = PagedModel(folder, backend="triton", device=device, max_adapters=2, max_rank=8)
    for slot, adapter in enumerate(adapters):
        model.load_adapter(slot, adapter)
    model.adapter_of_slot[:2] = torch.tensor([1, 0])
    prompts = [random_tokens(length, length) for length in (5, 6, 4)]
    for logits, tokens, own in zip(run(model, prompts), prompts, (adapters[1], adapters[0], None), strict=True):
        assert (logits.cpu() - reference(folder, own, tokens)).abs().max() < 1e-4


def run(model: PagedModel, prompts: list[list[int]]) -> list[Tensor]:
    """Logits of all tokens of every prompt: most in one step of all prompts, then in chunks, the last ones decoded."""
    for slot, tokens in enumerate(prompts):
        model.start(slot, len(tokens))
    pieces: list[list[Tensor]] = [[] for _ in prompts]
    starts = (0, 2, 3)
    for first, last in itertools.pairwise(starts):
        chunks = [(slot, tokens[first:last]) for slot, tokens in enumerate(prompts)]
        take(model.step([], chunks), [len(each) for _, each in chunks], range(len(prompts)), pieces)
    for position in range(starts[-1], max(map(len, prompts))):
        decode = [(slot, tokens[position]) for slot, tokens in enumerate(prompts) if position < len(tokens) - 1]
        last = [(slot, [tokens[position]]) for slot, tokens in enumerate(prompts) if position == len(tokens) - 1]
        order = [slot for slot, _ in decode] + [slot for slot, _ in last]
        if order:
            take(model.step(decode, last), [1] * len(order), order, pieces)
    return [torch.cat(each) for each in pieces]


def take(logits: Tensor, counts: list[int], order: Any, pieces: list[list[Tensor]]) -> None:
    for slot, part in zip(order, logits.split(counts), strict=True):
        pieces[slot].append(part)
