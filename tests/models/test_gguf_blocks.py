"""Blocks of GGUF files against the format's own package: what it dequantises, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from cb_backend.kernels.packed import dequantise_packed_torch, narrowed, pack
from cb_backend.models.gguf_blocks import BLOCK_KINDS, read_blocks
from tests.models.gguf_files import random_rows


def dequantised(kind: str, rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]).astype(np.float32))


def weight_of(kind: str, rows: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    stored = narrowed(read_blocks(kind, torch.from_numpy(rows)), dtype)
    packed = pack(
        stored.values, stored.scales, stored.kind, stored.group, global_scale=stored.global_scale, shifts=stored.shifts
    )
    return dequantise_packed_torch(packed)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("out_size", "num_blocks"), [(64, 4), (5, 1), (72, 3)])
def test_blocks_are_the_formats_numbers(kind: str, out_size: int, num_blocks: int) -> None:
    in_size = num_blocks * BLOCK_KINDS[kind].num_elements
    rows = random_rows(kind, out_size, in_size)
    assert rows.shape[1] == BLOCK_KINDS[kind].row_bytes(in_size)
    wanted = dequantised(kind, rows)
    assert wanted.unique().numel() > 20, "numbers that differ"
    assert torch.equal(weight_of(kind, rows), wanted)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_that_the_formats_package_made(kind: str) -> None:
    weight = np.random.default_rng(3).normal(0, 0.02, (40, 96)).astype(np.float32)
    rows = gguf.quantize(weight, gguf.GGMLQuantizationType[kind])
    assert torch.equal(weight_of(kind, rows), dequantised(kind, rows))


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_models_of_16_bits_have_scales_of_16_bits(kind: str) -> None:
    """The older kinds' are the file's own; products of 17 bits are rounded to 11, finer than bfloat16's 8."""
    rows = random_rows(kind, 64, 512, seed=1)
    found, wanted = weight_of(kind, rows, torch.bfloat16), dequantised(kind, rows)
    if "_K" not in kind:
        assert torch.equal(found, wanted)
    else:
        assert not torch.equal(found, wanted)
        largest = wanted.abs().view(64, -1, 32).amax(-1, keepdim=True)
        error = (found - wanted).abs().view(64, -1, 32)
        assert bool((error <= largest * 2.0**-9).all())


def test_scales_beyond_16_bits_stay_in_32() -> None:
    stored = read_blocks("Q4_K", torch.from_numpy(random_rows("Q4_K", 64, 256)))
    large = stored._replace(scales=stored.scales * 1e5)
    assert narrowed(large, torch.bfloat16).scales.dtype == torch.float32
    assert narrowed(stored, torch.bfloat16).scales.dtype == torch.float16
    assert narrowed(stored, torch.float32) is stored
