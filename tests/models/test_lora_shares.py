"""Adapters of models whose weights several devices share: the shares together are the adapter, and compute like it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cb_backend.layers.adapter_table import AdapterSite, AdapterTable
from cb_backend.layers.lora_linear import LoraLinear
from cb_backend.layers.ops import resolve_ops
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.lora_checkpoint import read_adapter
from cb_backend.models.registry import load_model, read_model_config
from cb_backend.parallel.group import Group
from tests.models.adapters import ALL_MODULES, modules_of, write_adapter
from tests.models.paged_model import PagedModel
from tests.models.quantised_models import FORMATS, pair
from tests.models.test_shards_of_checkpoints import OneOf
from tests.models.tiny_checkpoints import random_tokens, write_checkpoint
from tests.parallel.ranks import on_ranks

RANK = 3
# Heads of keys that ranks have in common (4 ranks, 2 or 1 of them), biases, norms around blocks, matrices stored as
# one, heads turned by neighbours, features between gate and down that do not come out, a block that all tokens share.
CHECKPOINTS = ["llama-gqa", "llama-mqa", "qwen2-bias", "gemma3", "phi3", "glm4", "qwen2-moe"]


def write_whole_numbers(name: str, folder: Path) -> tuple[Path, Path]:
    """(a checkpoint, an adapter for it): sums of the adapter's products are exact, and its scale is 2."""
    model = write_checkpoint(name, folder / "model")
    options = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": modules_of(name)}
    adapter = write_adapter(model, folder / "adapter", **options)
    weights = adapter / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(1)
    drawn = {
        name: torch.randint(-4, 5, tensor.shape, generator=generator).float()
        for name, tensor in load_file(weights).items()
    }
    save_file(drawn, weights, metadata={"format": "pt"})
    return model, adapter


def load(folder: Path, group: Group) -> tuple[DecoderForCausalLM, AdapterTable]:
    spec, device = read_model_config(folder), torch.device("cpu")
    table = AdapterTable(max_adapters=1, max_rank=RANK, dtype=torch.float32, device=device)
    options: dict[str, Any] = {"dtype": torch.float32, "device": device, "group": group, "adapters": table}
    return load_model(folder, spec, ops=resolve_ops("torch"), **options), table


def linears(model: DecoderForCausalLM) -> list[LoraLinear]:
    """In the order in which they were made."""
    found = []
    for layer in model.layers:
        block = layer.mlp if hasattr(layer.mlp, "gate_up_proj") else getattr(layer.mlp, "shared", None)
        found += [layer.self_attn.qkv_proj, layer.self_attn.o_proj]
        found += [] if block is None else [block.gate_up_proj, block.down_proj]
    assert all(isinstance(linear, LoraLinear) for linear in found)
    return found


def product(site: AdapterSite, rank: int, data: Tensor) -> Tensor:
    """What it adds to the projection's weight on this device."""
    a, b, scales = site.weights(data)
    parts, start = [], 0
    for index, size in enumerate(site.slices):
        parts.append(scales[index] * b[start : start + size] @ a[index * rank : (index + 1) * rank])
        start += size
    assert start == len(b)
    return torch.cat(parts)


@pytest.mark.parametrize(("name", "size"), [*((name, 4) for name in CHECKPOINTS), ("llama-gqa", 2)])
def test_a_rank_has_of_the_products_what_it_has_of_the_weights(name: str, size: int, tmp_path: Path) -> None:
    """The loader, which shares out weights, shares out an adapter's products in their place: they are those of the
    rank's own share, and zeros where weights are padded."""
    folder, adapter = write_whole_numbers(name, tmp_path)
    stored = load_file(adapter / "adapter_model.safetensors")
    modules = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in stored}
    for rank in range(size):
        model, table = load(folder, OneOf(rank, size))
        whole = read_adapter(adapter, read_model_config(folder), table.whole)
        share = table.share_of(whole.data)
        assert share.nbytes == table.bytes_per_adapter < table.whole.bytes_per_adapter
        taken = set()
        sites = iter(table.sites)
        for linear, site in zip(linears(model), sites, strict=True):
            assert linear.site is site
            linear.weight.zero_()
            for placement in linear.placements():
                module = placement.name.removesuffix(".weight")
                if module in modules:
                    a, b = (stored[f"base_model.model.{module}.lora_{half}.weight"] for half in "AB")
                    if placement.is_read:
                        placement.target.copy_(placement.prepare(2.0 * b @ a))
                    taken.add(module)
            assert torch.equal(product(site, table.rank, share), linear.weight), linear.projection.name
        assert taken == modules


def test_one_device_has_all_of_it(tmp_path: Path) -> None:
    folder, adapter = write_whole_numbers("llama-gqa", tmp_path)
    _, table = load(folder, OneOf(0, 1))
    assert table.whole is table
    packed = read_adapter(adapter, read_model_config(folder), table)
    assert torch.equal(table.share_of(packed.data), packed.data)


PROMPTS = random_tokens(21, 1), random_tokens(9, 2), random_tokens(12, 3)


@torch.inference_mode()
def logits(folder: Path, adapters: list[Path], group: Group | None = None) -> Tensor:
    """Two adapters and rows without one in a step: of prompts, chunks of them, then of single tokens, between which a
    slot is filled anew."""
    model = PagedModel(folder, group=group, max_adapters=2, max_rank=8)
    for slot, prompt in enumerate(PROMPTS):
        model.start(slot, len(prompt))
    model.load_adapter(0, adapters[0])
    model.load_adapter(1, adapters[1])
    model.adapter_of_slot[:] = torch.tensor([1, 0, -1])
    first, second, third = PROMPTS
    found = [model.step([], [(0, first[:8]), (1, second), (2, third)]), model.step([], [(0, first[8:])])]
    found.append(model.step([(0, 5), (1, 6), (2, 7)], []))
    model.load_adapter(0, adapters[2])
    found += [model.step([(0, token), (1, token + 1), (2, token + 2)], []) for token in (60, 17)]
    return torch.cat(found)


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama-gqa", 2), ("qwen2-bias", 4), ("gemma3", 2), ("phi3", 2), ("olmo2", 2), ("qwen2-moe", 2)],
)
def test_devices_with_adapters_compute_what_one_computes(name: str, size: int, tmp_path: Path) -> None:
    compare(write_checkpoint(name, tmp_path / "model"), None, modules_of(name), size, tmp_path)


@pytest.mark.parametrize("name", ["awq 64", "gptq act-order"])
def test_beside_weights_of_few_bits(name: str, tmp_path: Path) -> None:
    """Gate and up lie in turn, shares are padded to steps of the format."""
    plain, quantised = pair(tmp_path, "llama", *FORMATS[name])
    compare(plain, quantised, ALL_MODULES, 2, tmp_path)


def compare(folder: Path, quantised: Path | None, targets: list[str], size: int, room: Path) -> None:
    adapters = [
        write_adapter(folder, room / str(seed), seed=seed, r=rank, lora_alpha=rank, target_modules=targets)
        for seed, rank in enumerate((3, 8, 5))
    ]
    folder = quantised or folder
    whole = logits(folder, adapters)
    first, *_ = on_ranks(size, lambda group: logits(folder, adapters, group))
    torch.testing.assert_close(first, whole, atol=1e-4, rtol=1e-4)
    assert torch.equal(first.argmax(1), whole.argmax(1))
