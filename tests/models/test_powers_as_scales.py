"""Scales that are stored as powers of two (F8_E8M0): of fp8 in blocks, and of mxfp4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.stored_weights import read_mxfp4
from tests.models.paged_model import PagedModel
from tests.models.quantised_models import FORMATS, logits, pair
from tests.models.quantised_writers import write_mxfp4

FILE = "model.safetensors"
POWERS = torch.float8_e8m0fnu


@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 blocks of compressed-tensors"])
def test_scales_of_blocks(form: str, tmp_path: Path) -> None:
    config, writer = FORMATS[form]
    plain, quantised = pair(tmp_path, "llama", config, writer)
    tensors, numbers = load_file(quantised / FILE), load_file(plain / FILE)
    for name in [name for name in tensors if "_proj.weight_scale" in name]:
        scale = tensors[name].float().log2().round().exp2()
        weight = name.partition("_scale")[0]
        rows, columns = tensors[weight].shape
        whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        tensors[name], numbers[weight] = scale.to(POWERS), tensors[weight].float() * whole
    save_file(tensors, quantised / FILE, {"format": "pt"})
    save_file(numbers, plain / FILE, {"format": "pt"})
    torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_scales_of_mxfp4(family: str, tmp_path: Path) -> None:
    config, writer = FORMATS["mxfp4"]
    plain, quantised = pair(tmp_path, family, config, writer)
    tensors = load_file(quantised / FILE)
    powers = {name: each.view(POWERS) for name, each in tensors.items() if name.endswith("weight_scale")}
    save_file({**tensors, **powers}, quantised / FILE, {"format": "pt"})
    torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)


def test_powers_of_experts_that_are_stored_together() -> None:
    """As gpt-oss's reader is given them, an expert at a time."""
    written, _ = write_mxfp4(8, 64)
    found, wanted = (
        read_mxfp4(written["blocks"], each) for each in (written["scales"].view(POWERS), written["scales"])
    )
    assert torch.equal(found.scales, wanted.scales)


def test_a_power_that_is_no_number_is_named(tmp_path: Path) -> None:
    config, writer = FORMATS["fp8 blocks"]
    _, quantised = pair(tmp_path, "llama", config, writer)
    tensors = load_file(quantised / FILE)
    name = "model.layers.1.mlp.down_proj.weight_scale_inv"
    tensors[name] = torch.full(tensors[name].shape, 255, dtype=torch.uint8).view(POWERS)
    save_file(tensors, quantised / FILE, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"1\.mlp\.down_proj\.\w+ belongs to a matrix with a scale that is not"):
        PagedModel(quantised)
