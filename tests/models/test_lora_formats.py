"""Adapters beside weights of few bits: the adapter's part is what it is beside plain weights, whatever these are in."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import cb_backend.layers
from cb_backend.layers.linear import Linear
from cb_backend.layers.lora_linear import LoraLinear
from cb_backend.models.lora_config import read_lora_config
from tests.models.adapters import ALL_MODULES, load_merged, write_adapter
from tests.models.paged_model import PagedModel
from tests.models.quantised_models import FORMATS, pair
from tests.models.test_fp8_weights import RoundingLinear
from tests.models.tiny_checkpoints import load_reference, random_tokens, write_checkpoint

PROMPTS = [random_tokens(21, 1), random_tokens(9, 2)]
WRAPPING = "base_model.model."


def logits(folder: Path, adapter: Path, **options: Any) -> tuple[Tensor, Tensor]:
    """Of two prompts in one step, each in a part of it: through the adapter, and without it."""
    model = PagedModel(folder, max_adapters=2, max_rank=8, **options)
    model.load_adapter(1, adapter)
    model.adapter_of_slot[0] = 1
    found = []
    for slot, tokens in enumerate(PROMPTS):
        model.start(slot, len(tokens))
    for part in (slice(0, 5), slice(5, None)):
        chunks = [(slot, tokens[part]) for slot, tokens in enumerate(PROMPTS)]
        found.append(model.step([], chunks).split([len(tokens) for _, tokens in chunks]))
    through, without = (torch.cat(each) for each in zip(*found, strict=True))
    return through, without


@torch.inference_mode()
def merged_logits(folder: Path, adapter: Path | None, tokens: list[int]) -> Tensor:
    found: Tensor = load_merged(folder, adapter)(torch.tensor([tokens])).logits[0]
    return found


@pytest.mark.parametrize("name", [
    "awq 64", "gptq act-order", "w4a16", "w4a16, channel", "w8a16", "fp8 blocks", "nvfp4", "mxfp4",
])  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "llama, biases", "qwen2"])
def test_packed_weights(family: str, name: str, tmp_path: Path) -> None:
    """Gate and up of packed weights lie in turn where there are no biases, and beside each other where there are."""
    config, writer = FORMATS[name]
    plain, quantised = pair(tmp_path, family, config, writer)
    adapter = write_adapter(plain, tmp_path / "adapter", r=5, lora_alpha=7, target_modules=ALL_MODULES)
    through, without = logits(quantised, adapter)
    wanted, base = merged_logits(plain, adapter, PROMPTS[0]), merged_logits(plain, None, PROMPTS[1])
    scale = wanted.abs().max()
    assert (through - wanted).abs().max() < 1e-4 * max(1.0, float(scale))
    assert (without - base).abs().max() < 1e-4
    assert (wanted - merged_logits(plain, None, PROMPTS[0])).abs().max() > 0.1, "an adapter that matters"


def test_a_projection_with_a_product_of_its_own_says_what_runs_beside_it() -> None:
    """`Linear`'s own lets the adapters' part start beside the plain product, which would then be of no weight."""
    for module in pkgutil.iter_modules(cb_backend.layers.__path__):
        importlib.import_module(f"cb_backend.layers.{module.name}")
    kinds, seen = [Linear], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        own = vars(kind).keys() & {"__call__", "with_shrunk"}
        assert own in (set(), {"__call__", "with_shrunk"}) or kind is LoraLinear, kind
        seen.add(kind.__name__)
    assert seen > {"PartialLinear", "Fp8Linear", "PackedLinear", "SeparateLinear", "WrittenOutLinear"}


class Adapted(nn.Module):
    """A module, and what an adapter adds."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.a, self.b, self.scale = base, a, b, scale

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.base(x) + self.scale * (x @ self.a.t() @ self.b.t())
        return added


@torch.inference_mode()
def rounding_reference(folder: Path, adapter: Path, tokens: list[int]) -> Tensor:
    """transformers' model with projections that round to fp8, and the adapter beside them in full."""
    model, tensors = load_reference(folder), load_file(adapter / "adapter_model.safetensors")
    config = read_lora_config(adapter)
    for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
        for place in ("self_attn", "mlp"):
            block = getattr(layer, place)
            for name, module in list(block.named_children()):
                if isinstance(module, nn.Linear):
                    full = f"model.layers.{index}.{place}.{name}"
                    a, b = (tensors[f"{WRAPPING}{full}.lora_{half}.weight"] for half in "AB")
                    setattr(block, name, Adapted(RoundingLinear(module), a, b, config.scale_of(full)))
    found: Tensor = model(torch.tensor([tokens])).logits[0]
    return found


@pytest.mark.parametrize("name", ["llama-gqa", "llama-biases", "qwen3"])
def test_fp8_weights(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path / "model")
    adapter = write_adapter(folder, tmp_path / "adapter", r=3, lora_alpha=3, target_modules=ALL_MODULES)
    through, _ = logits(folder, adapter, quantization="fp8")
    wanted = rounding_reference(folder, adapter, PROMPTS[0])
    errors = (through - wanted).abs()
    # A rounding error before fp8 is a step of fp8 after it: rarely.
    assert errors.median() < 1e-4
    assert errors.max() < 0.05 * wanted.abs().max()
