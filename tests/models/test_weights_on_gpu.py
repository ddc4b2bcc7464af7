"""Weights that a GPU was given are those of the file: pytest -m gpu tests/models/test_weights_on_gpu.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.layers.fp8_linear import QuantizedRows
from cb_backend.layers.ops import resolve_ops
from cb_backend.models import weight_reader
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.registry import load_model, read_model_config
from tests.models.bench_load import write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def load(folder: Path, device: str, dtype: torch.dtype, **options: Any) -> DecoderForCausalLM:
    spec, where = read_model_config(folder), torch.device(device)
    return load_model(folder, spec, ops=resolve_ops("torch"), dtype=dtype, device=where, **options)


def tensors_of(model: DecoderForCausalLM) -> dict[str, list[Tensor]]:
    targets = ((placement.name, placement.target) for placement in model.placements())
    return {
        name: [target.values.view(torch.uint8), target.scales] if isinstance(target, QuantizedRows) else [target]  # type: ignore[list-item]
        for name, target in targets
    }


@pytest.mark.parametrize("piece", [1 << 12, 16 << 20])
@pytest.mark.parametrize("num_threads", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_tensor_is_the_files(
    dtype: torch.dtype, num_threads: int, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "tiny")
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", piece)
    monkeypatch.setattr(weight_reader, "num_threads", lambda: num_threads)
    wanted, found = (tensors_of(load(tmp_path, device, dtype)) for device in ("cpu", "cuda"))
    for name, tensors in wanted.items():
        assert all(torch.equal(one.cpu(), other) for one, other in zip(found[name], tensors, strict=True)), name


@pytest.mark.parametrize("num_threads", [1, 5])
def test_weights_that_are_quantised_on_the_way(
    num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device, so a quotient may be rounded otherwise there."""
    write(tmp_path, "tiny")
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(weight_reader, "num_threads", lambda: num_threads)
    models = [load(tmp_path, device, torch.bfloat16, quantization="fp8") for device in ("cpu", "cuda")]
    for one, other in zip(*(tensors_of(model).values() for model in models), strict=True):
        same = (one[0] == other[0].cpu()).float().mean().item()
        assert same > 0.999
        if len(one) > 1:
            torch.testing.assert_close(one[1], other[1].cpu(), rtol=1e-6, atol=0)
