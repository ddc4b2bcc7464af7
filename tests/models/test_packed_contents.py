"""Packed tensors that contradict each other: file and matrix are named, of layers and of experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from tests.models.paged_model import PagedModel
from tests.models.quantised_models import FORMATS, pair

FILE = "model.safetensors"
MATRICES = {"llama": "model.layers.1.mlp.down_proj", "qwen3-moe": "model.layers.1.mlp.experts.2.down_proj"}


def put(ending: str, value: float) -> Callable[[dict[str, Tensor], str], None]:
    """Another number at the first place of a matrix's tensor."""

    def change(tensors: dict[str, Tensor], matrix: str) -> None:
        tensors[f"{matrix}.{ending}"].view(-1)[0] = value

    return change


BROKEN: dict[str, tuple[str, Callable[[dict[str, Tensor], str], None], str]] = {
    "groups": ("gptq 64", put("g_idx", 2), r"g_idx does not name each of 3 groups 64 times"),
    "zero points": ("gptq symmetric", put("qzeros", 5), r"'sym' is true but zero points are stored as \[0, 5, 7\]"),
    "sizes": ("w4a16", put("weight_shape", 5), r"weight_packed has shape \[128, 24\]; expected \[5, 24\]"),
    "nan": ("fp8 blocks", put("weight", float("nan")), r"weight holds numbers that are not finite"),
    "a scale": ("awq 64", put("scales", float("inf")), r"scale that is not finite"),
}  # fmt: skip


@pytest.mark.parametrize("family", MATRICES)
@pytest.mark.parametrize("name", BROKEN)
def test_file_and_matrix_are_named(name: str, family: str, tmp_path: Path) -> None:
    form, change, reason = BROKEN[name]
    _, quantised = pair(tmp_path, family, *FORMATS[form])
    tensors = load_file(quantised / FILE)
    change(tensors, MATRICES[family])
    save_file(tensors, quantised / FILE, {"format": "pt"})
    matrix = MATRICES[family].replace(".", r"\.")
    with pytest.raises(ConfigError, match=rf"^{FILE}: tensor {matrix}\.\w+ belongs to a matrix .*{reason}"):
        PagedModel(quantised)
