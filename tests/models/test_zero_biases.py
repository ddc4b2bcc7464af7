"""Biases that AutoGPTQ writes for every matrix: zeros, of models that have none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cb_backend.contracts.errors import ConfigError
from tests.models.paged_model import PagedModel
from tests.models.quantised_models import FORMATS, logits, pair

FILE = "model.safetensors"
UP = "model.layers.1.mlp.up_proj"


def write(folder: Path, family: str, form: str = "gptq 64") -> tuple[Path, Path]:
    """A pair whose quantised side has a bias of zeros for every matrix that has none."""
    plain, quantised = pair(folder, family, *FORMATS[form])
    tensors = load_file(quantised / FILE)
    for module in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        zeros = torch.zeros(tensors[f"{module}.qweight"].shape[1], dtype=torch.float16)
        tensors.setdefault(f"{module}.bias", zeros)
    save_file(tensors, quantised / FILE, {"format": "pt"})
    return plain, quantised


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3-moe"])
def test_zeros_are_passed_over_and_biases_are_not(family: str, tmp_path: Path) -> None:
    plain, quantised = write(tmp_path, family)
    torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)


def test_a_bias_that_is_not_zero_is_refused_by_name(tmp_path: Path) -> None:
    _, quantised = write(tmp_path, "llama")
    tensors = load_file(quantised / FILE)
    tensors[f"{UP}.bias"][7] = 0.5
    save_file(tensors, quantised / FILE, {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"^{FILE}: tensor {UP}\.bias has no place .*, and it is not all zeros$"):
        PagedModel(quantised)


def test_a_bias_beside_a_plain_matrix_is_refused(tmp_path: Path) -> None:
    _, quantised = write(tmp_path, "llama")
    tensors = load_file(quantised / FILE)
    save_file({**tensors, "lm_head.bias": torch.zeros(97)}, quantised / FILE, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"tensor lm_head\.bias has no place"):
        PagedModel(quantised)
