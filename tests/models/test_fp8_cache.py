"""An fp8 cache against transformers, whose own cache is made to round what it keeps; and the checkpoint's scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from cb_backend.contracts.errors import ConfigError
from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import load_reference, random_tokens, write_checkpoint

FP8 = torch.float8_e4m3fn


class RoundingCache(DynamicCache):
    """Keys and values go through fp8, divided by a scale of their own, before anything sees them."""

    def __init__(self, key_scale: float, value_scale: float) -> None:
        super().__init__()
        self.scales = key_scale, value_scale

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rounded = [
            (states / scale).clamp(-448, 448).to(FP8).float() * scale
            for states, scale in zip((key_states, value_states), self.scales, strict=True)
        ]
        result: tuple[Tensor, Tensor] = super().update(*rounded, *args, **kwargs)
        return result


def with_scales(folder: Path, key_scale: float, value_scale: float, key_name: str = "k_scale") -> Path:
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        tensors[f"{prefix}.{key_name}"] = torch.tensor(key_scale)
        tensors[f"{prefix}.v_scale"] = torch.tensor([value_scale])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@torch.inference_mode()
def reference(folder: Path, prompt: list[int], decode: list[int], scales: tuple[float, float]) -> Tensor:
    model, cache = load_reference(folder), RoundingCache(*scales)
    output = model(torch.tensor([prompt]), past_key_values=cache, use_cache=True)
    steps = [model(torch.tensor([[token]]), past_key_values=cache, use_cache=True) for token in decode]
    return torch.cat([output.logits[0], *(step.logits[0] for step in steps)])


# With a key scale of 0.005 most keys are beyond 448 times it: they saturate, and nothing becomes NaN.
@pytest.mark.parametrize(
    ("name", "scales"),
    [("llama-gqa", (1.0, 1.0)), ("qwen3", (0.03, 0.2)), ("mistral-window", (1.0, 0.1)), ("llama-gqa", (0.005, 0.01))],
)
def test_logits_are_those_of_a_rounding_cache(name: str, scales: tuple[float, float], tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path)
    prompt, decode = random_tokens(30, 1), random_tokens(6, 2)
    wanted = reference(folder, prompt, decode, scales)
    paged = PagedModel(with_scales(folder, *scales), kv_dtype=FP8)
    for chunk in (30, 7):
        paged.start(0, len(prompt))
        got = [paged.prefill(0, prompt, chunk), *(paged.step([(0, token)], []) for token in decode)]
        errors = (torch.cat(got) - wanted).abs()
        # Where two computations differ by a rounding error before fp8, they differ by a step of fp8 after it: rarely.
        assert errors.median() < 1e-5
        assert errors.max() < 0.05 * wanted.abs().max()
    full = PagedModel(folder)
    full.start(0, len(prompt))
    assert (full.prefill(0, prompt) - wanted[:30]).abs().median() > 1e-3  # the format is felt at all


def test_scales_of_both_spellings_are_read_and_do_not_matter_otherwise(tmp_path: Path) -> None:
    folder = with_scales(write_checkpoint("llama-gqa", tmp_path), 0.5, 0.25, key_name="k_proj.k_scale")
    attention = PagedModel(folder, kv_dtype=FP8).model.layers[1].self_attn
    assert (attention.key_scale, attention.value_scale) == (0.5, 0.25)
    attention = PagedModel(folder).model.layers[1].self_attn
    assert (attention.key_scale, attention.value_scale) == (1.0, 1.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(scale: float, tmp_path: Path) -> None:
    folder = with_scales(write_checkpoint("llama-gqa", tmp_path), scale, 1.0)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.k_scale is \[.*one number above 0 a layer"):
        PagedModel(folder, kv_dtype=FP8)
