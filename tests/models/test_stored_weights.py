"""Readers of quantised projections against writers that know nothing of them, and against values worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.packed import StoredWeight, dequantise_packed_torch, pack
from cb_backend.models import stored_weights as module
from tests.models import quantised_writers as writers


def weight_of(stored: StoredWeight) -> Tensor:
    """What the device would hold, with columns back in the weight's own order."""
    packed = pack(
        stored.values, stored.scales.float(), stored.kind, stored.group, stored.zeros, global_scale=stored.global_scale
    )
    found = dequantise_packed_torch(packed)
    if stored.order is None:
        return found
    back = torch.empty_like(found)
    back[:, stored.order] = found
    return back


def gptq(tensors: dict[str, Tensor], **given: Any) -> StoredWeight:
    return module.read_gptq(tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors["g_idx"], **given)


V1 = {"bits": 4, "is_v2": False, "is_symmetric": False}
CASES: dict[str, tuple[writers.Written, Callable[[dict[str, Tensor]], StoredWeight]]] = {
    "awq 128": (writers.write_awq(64, 256, 128), lambda t: module.read_awq(**t)),
    "awq 32": (writers.write_awq(72, 96, 32), lambda t: module.read_awq(**t)),
    "awq 64, one group": (writers.write_awq(8, 64, 64), lambda t: module.read_awq(**t)),
    "gptq": (writers.write_gptq(64, 256, 128), lambda t: gptq(t, **V1)),
    "gptq v2": (writers.write_gptq(64, 256, 64, is_v2=True), lambda t: gptq(t, **{**V1, "is_v2": True})),
    "gptq symmetric": (
        writers.write_gptq(64, 256, 128, is_symmetric=True), lambda t: gptq(t, **{**V1, "is_symmetric": True})),
    "gptq symmetric, v2 named v1": (
        writers.write_gptq(64, 256, 128, is_symmetric=True, is_v2=True),
        lambda t: gptq(t, **{**V1, "is_symmetric": True})),
    "gptq act-order": (writers.write_gptq(64, 256, 32, is_act_order=True), lambda t: gptq(t, **V1)),
    "gptq one group": (writers.write_gptq(64, 96, -1), lambda t: gptq(t, **V1)),
    "gptq 8 bits": (writers.write_gptq(64, 256, 128, bits=8), lambda t: gptq(t, **{**V1, "bits": 8})),
    "gptq 8 bits act-order": (
        writers.write_gptq(64, 256, 128, bits=8, is_act_order=True), lambda t: gptq(t, **{**V1, "bits": 8})),
    "pack-quantized": (writers.write_pack_quantized(64, 256, 128), lambda t: module.read_pack_quantized(**t, bits=4)),
    "pack-quantized zeros": (
        writers.write_pack_quantized(72, 256, 128, has_zeros=True), lambda t: module.read_pack_quantized(**t, bits=4)),
    "pack-quantized plain zeros": (
        writers.write_pack_quantized(64, 256, 64, has_zeros=True, are_zeros_packed=False),
        lambda t: module.read_pack_quantized(**t, bits=4)),
    "pack-quantized act-order": (
        writers.write_pack_quantized(64, 256, 64, is_act_order=True),
        lambda t: module.read_pack_quantized(**t, bits=4)),
    "pack-quantized channel": (
        writers.write_pack_quantized(64, 200, -1), lambda t: module.read_pack_quantized(**t, bits=4)),
    "pack-quantized 8 bits": (
        writers.write_pack_quantized(64, 256, 128, bits=8), lambda t: module.read_pack_quantized(**t, bits=8)),
    "pack-quantized 8 bits zeros": (
        writers.write_pack_quantized(64, 256, 128, bits=8, has_zeros=True),
        lambda t: module.read_pack_quantized(**t, bits=8)),
    "int-quantized": (writers.write_int_quantized(64, 200), lambda t: module.read_int_quantized(**t)),
    "fp8 blocks": (
        writers.write_fp8_blocks(300, 256), lambda t: module.read_fp8(t["weight"], t["weight_scale_inv"], (128, 128))),
    "fp8 blocks bf16, cut": (
        writers.write_fp8_blocks(200, 200, dtype=torch.bfloat16),
        lambda t: module.read_fp8(t["weight"], t["weight_scale_inv"], (128, 128))),
    "nvfp4": (
        writers.write_nvfp4(64, 256),
        lambda t: module.read_nvfp4(t["weight_packed"], t["weight_scale"], t["weight_global_scale"], is_divisor=True)),
    "nvfp4 modelopt": (
        writers.write_nvfp4(64, 256, is_modelopt=True),
        lambda t: module.read_nvfp4(t["weight"], t["weight_scale"], t["weight_scale_2"], is_divisor=False)),
    "mxfp4": (writers.write_mxfp4(64, 256), lambda t: module.read_mxfp4(**t)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_writers_wrote_is_read(name: str) -> None:
    (tensors, wanted), read = CASES[name]
    torch.testing.assert_close(weight_of(read(tensors)).double(), wanted, rtol=1e-5, atol=0)


def test_awq_by_hand() -> None:
    """One word of eight columns: the nibbles from the lowest are columns 0, 2, 4, 6, 1, 3, 5, 7."""
    word = sum(value << (4 * i) for i, value in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    qweight = torch.full((32, 1), word, dtype=torch.int32)
    stored = module.read_awq(qweight, torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 8), 0.5))
    assert weight_of(stored)[:, 0].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]


@pytest.mark.parametrize(("is_v2", "zero"), [(False, 4), (True, 3)])
def test_gptq_by_hand(is_v2: bool, zero: int) -> None:
    """A stored zero point of 3 is 4 in the first format and 3 in the second; elements lie along the inputs."""
    qweight = torch.tensor([[0x76543210]] * 4, dtype=torch.int32)
    stored = module.read_gptq(
        qweight.expand(4, 8).contiguous(), torch.full((1, 1), 0x33333333, dtype=torch.int32), torch.full((1, 8), 2.0),
        None, bits=4, is_v2=is_v2, is_symmetric=False,
    )  # fmt: skip
    assert weight_of(stored)[0, :8].tolist() == [2.0 * (i - zero) for i in range(8)]


def test_gptq_zero_points_wrap() -> None:
    """15 is what the first format stores for a zero point of 0."""
    stored = module.read_gptq(
        torch.zeros(4, 8, dtype=torch.int32), torch.full((1, 1), -1, dtype=torch.int32), torch.ones(1, 8), None,
        bits=4, is_v2=False, is_symmetric=False,
    )  # fmt: skip
    assert not weight_of(stored).any()


def test_mxfp4_by_hand() -> None:
    """The low nibble first; 2 is 1.0 and 15 is -6.0; a scale of 126 is a half."""
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0] = 0xF2
    found = weight_of(module.read_mxfp4(blocks, torch.full((1, 1), 126, dtype=torch.uint8)))
    assert found[0, :3].tolist() == [0.5, -3.0, 0.0]


def test_what_does_not_fit_is_refused_by_name() -> None:
    tensors, _ = writers.write_gptq(64, 256, 128)
    with pytest.raises(ConfigError, match=r"qzeros has shape \[2, 7\]; expected \[2, 8\]"):
        gptq({**tensors, "qzeros": tensors["qzeros"][:, :7]}, **V1)
    with pytest.raises(ConfigError, match="'sym' is true but zero points are stored as"):
        gptq(tensors, **{**V1, "is_symmetric": True})
    with pytest.raises(ConfigError, match="GPTQ weights of 3 bits"):
        gptq(tensors, **{**V1, "bits": 3})
    with pytest.raises(ConfigError, match="g_idx does not name each of 2 groups 128 times"):
        gptq({**tensors, "g_idx": torch.zeros(256, dtype=torch.int32)}, **V1)
    packed, _ = writers.write_pack_quantized(64, 256, 128)
    with pytest.raises(ConfigError, match=r"weight_packed has shape \[64, 31\]; expected \[64, 32\]"):
        module.read_pack_quantized(**{**packed, "weight_packed": packed["weight_packed"][:, :31]}, bits=4)
    blocks, _ = writers.write_fp8_blocks(256, 256)
    with pytest.raises(ConfigError, match=r"weight_block_size is \[64, 64\]"):
        module.read_fp8(blocks["weight"], blocks["weight_scale_inv"], (64, 64))
    broken = blocks["weight"].clone()
    broken.view(torch.uint8)[3, 5] = 0x7F
    with pytest.raises(ConfigError, match="not finite"):
        module.read_fp8(broken, blocks["weight_scale_inv"], (128, 128))
