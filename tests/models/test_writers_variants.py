"""What writers of the same format do differently, where the numbers are the same: shapes, names, tensors left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from tests.models.paged_model import PagedModel
from tests.models.quantised_models import FORMATS, logits, pair
from tests.models.test_fp8_weights import edit_config

FILE = "model.safetensors"


def edit(folder: Path, change: Callable[[str, Tensor], Tensor | None]) -> None:
    """Each tensor as `change` has it; without those that it has as None."""
    changed = {name: change(name, tensor) for name, tensor in load_file(folder / FILE).items()}
    save_file({name: each for name, each in changed.items() if each is not None}, folder / FILE, {"format": "pt"})


def shaped(ending: str, *shape: int) -> Callable[[str, Tensor], Tensor | None]:
    return lambda name, tensor: tensor.reshape(shape) if name.endswith(ending) else tensor


VARIANTS: dict[str, tuple[str, Callable[[str, Tensor], Tensor | None]]] = {
    "factors of ModelOpt as [1]": ("nvfp4 of ModelOpt", shaped(".weight_scale_2", 1)),
    "factors as one number": ("nvfp4", shaped(".weight_global_scale")),
    "scales of rows as [N]": ("w8a8", shaped(".weight_scale", -1)),
    "packed scales of rows as [N]": ("w4a16, channel", shaped(".weight_scale", -1)),
    "no groups of inputs": ("gptq 64", lambda name, tensor: None if name.endswith(".g_idx") else tensor),
}


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_numbers_are_the_same(name: str, family: str, tmp_path: Path) -> None:
    form, change = VARIANTS[name]
    if family == "qwen3-moe" and form.startswith("nvfp4"):
        pytest.skip("experts with a global scale are not supported")
    plain, quantised = pair(tmp_path, family, *FORMATS[form])
    edit(quantised, change)
    torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(1, -1), (2, -1)])
def test_another_shape_is_still_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    """But for dimensions of one; of two, an order would be guessed."""
    _, quantised = pair(tmp_path, "llama", *FORMATS["w4a16"])
    edit(quantised, shaped("down_proj.weight_scale", *shape))
    with pytest.raises(ConfigError, match=r"down_proj\.weight_scale has shape \[\d, \d+\], config\.json asks for"):
        PagedModel(quantised)


def test_groups_of_some_inputs_alone_are_missing(tmp_path: Path) -> None:
    _, quantised = pair(tmp_path, "llama", *FORMATS["gptq act-order"])
    edit(quantised, lambda name, tensor: None if name.endswith("1.mlp.down_proj.g_idx") else tensor)
    with pytest.raises(ConfigError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.g_idx is missing"):
        PagedModel(quantised)


def test_inputs_in_order_of_activations_need_their_groups(tmp_path: Path) -> None:
    _, quantised = pair(tmp_path, "llama", *FORMATS["gptq act-order"])
    edit(quantised, lambda name, tensor: None if name.endswith(".g_idx") else tensor)
    with pytest.raises(ConfigError, match=r"tensor model\.layers\.0\.\w+\.\w+\.g_idx is missing"):
        PagedModel(quantised)


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def test_awqs_own_names_of_its_settings(tmp_path: Path) -> None:
    plain, quantised = pair(tmp_path, "llama", *FORMATS["awq 64"])
    said = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
    edit_config(quantised, said)
    torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize("key", ["compression_config", "quantization_config"])
def test_groups_of_modules_tell_the_method(key: str, tmp_path: Path) -> None:
    plain, quantised = pair(tmp_path, "llama", *FORMATS["w4a16"])

    def change(values: dict[str, Any]) -> None:
        said = values.pop("quantization_config")
        del said["quant_method"]
        values[key] = said

    change_config(quantised, change)
    torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", ["gptq 64", "awq 64", "w4a16", "w8a8", "fp8 blocks", "nvfp4", "nvfp4 of ModelOpt"])
def test_a_quantised_checkpoint_without_a_word_of_it_is_told_so(form: str, tmp_path: Path) -> None:
    _, quantised = pair(tmp_path, "llama", *FORMATS[form])
    change_config(quantised, lambda values: values.pop("quantization_config"))
    told = rf"^{FILE}: tensor .* is \w+; the checkpoint is quantised, but config\.json does not say how \(quant"
    with pytest.raises(ConfigError, match=told):
        PagedModel(quantised)
