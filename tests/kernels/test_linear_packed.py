"""Products with packed weights: layout, kernel, pieces for the library and twins, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cb_backend.kernels import linear_packed as module
from cb_backend.kernels.dequantise_packed import dequantise_packed
from cb_backend.kernels.launch import overriding
from cb_backend.kernels.linear_packed import (
    linear_packed,
    linear_packed_torch,
    linear_silu_mul_packed,
    linear_silu_mul_packed_torch,
)
from cb_backend.kernels.packed import KINDS, PackedWeight, dequantise_packed_torch, pack, pack_values, unpack_values
from cb_backend.kernels.split_sums import counters

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
ON_GPU = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
DTYPES = [torch.float16, ON_GPU]
TILED = {"block_n": 64, "splits": 1, "num_warps": 4, "num_stages": 2}
SHIFTS = "shifts"
# (kind, group, has zero points, or shifts in their stead)
FORMATS = [
    ("int4", 128, False), ("int4", 128, True), ("int4", 64, True), ("int4", 32, False), ("int4", 32, True),
    ("int4", -1, False), ("int4", -1, True), ("int4", 256, True),
    ("int8", 128, False), ("int8", 64, True), ("int8", -1, False), ("int8", 128, True),
    ("int8", 32, False), ("int8", 32, True),
    ("fp8", 128, False), ("fp8", -1, False), ("fp4", 32, False), ("fp4", 16, False),
    ("int4", 32, SHIFTS), ("int8", 32, SHIFTS),
]  # fmt: skip
# (num_rows, out_size, in_size, splits): odd ones, more than one tile and split, padding in both directions
SHAPES = [(1, 64, 256, 1), (3, 70, 200, 1), (17, 130, 640, 4)]
MANY = [(130, 70, 300, 1), (257, 70, 256, 2)]  # more than one block of rows
FP4_SIZES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def stored_numbers(kind: str, size: tuple[int, int]) -> Tensor:
    stored = torch.randint(0, 2 ** KINDS[kind].bits, size, dtype=torch.uint8)
    return stored.masked_fill((stored & 0x7F) == 0x7F, 3) if kind == "fp8" else stored  # no NaN


def make(
    kind: str,
    group: int,
    has_zeros: bool | str,
    out_size: int,
    in_size: int,
    dtype: torch.dtype,
    is_gated: bool = False,
) -> tuple[PackedWeight, Tensor]:
    """A packed weight and, made apart from all code that is tested, the numbers it stands for in float64."""
    torch.manual_seed(out_size + in_size + group)
    stored = stored_numbers(kind, (out_size, in_size))
    width = in_size if group == -1 else group
    num_groups = -(-in_size // width)
    scales = (torch.rand(out_size, num_groups) + 0.1) * 2.0 ** torch.randint(-6, -2, (out_size, 1))
    if kind == "fp4":
        scales = 2.0 ** torch.randint(-8, 2, (out_size, num_groups)) if group == 32 else scales.to(torch.float8_e4m3fn)
    scales = scales.to(dtype) if kind != "fp8" else scales.float()
    zeros = shifts = None
    if has_zeros == SHIFTS:
        shifts = (scales.float() * -5 * torch.rand(scales.shape)).to(scales.dtype)
    elif has_zeros:
        zeros = torch.randint(0, 2 ** KINDS[kind].bits, scales.shape, dtype=torch.uint8)
    if kind == "fp8":
        values = stored.view(torch.float8_e4m3fn).double()
    elif kind == "fp4":
        values = torch.tensor(FP4_SIZES, dtype=torch.float64)[(stored % 8).long()] * (1 - 2.0 * (stored // 8))
    else:
        middle = 2.0 ** (KINDS[kind].bits - 1)
        minus = middle if zeros is None else zeros.double().repeat_interleave(width, 1)[:, :in_size]
        values = stored.double() - (minus if shifts is None else 0)
    wanted = values * scales.double().repeat_interleave(width, 1)[:, :in_size]
    if shifts is not None:
        wanted += shifts.double().repeat_interleave(width, 1)[:, :in_size]
    return pack(stored, scales, kind, group, zeros, global_scale=0.5, is_gated=is_gated, shifts=shifts), wanted * 0.5


def to(device: torch.device, weight: PackedWeight) -> PackedWeight:
    names = ("values", "scales", "zeros", "shifts")
    tensors = {name: getattr(weight, name) for name in names if getattr(weight, name) is not None}
    return replace(weight, **{name: tensor.to(device) for name, tensor in tensors.items()})


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Within the tolerance of the largest: sums cancel."""
    torch.testing.assert_close(
        found.cpu().double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().amax().clamp(min=1e-6))
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(64, 128), (1, 1), (65, 129), (200, 300)])
def test_packing_loses_nothing(kind: str, size: tuple[int, int]) -> None:
    torch.manual_seed(1)
    stored = stored_numbers(kind, size)
    packed = pack_values(stored, kind)
    unpacked = unpack_values(packed, kind)
    assert torch.equal(unpacked[: size[0], : size[1]], stored)
    padding = unpacked.clone()
    padding[: size[0], : size[1]] = KINDS[kind].offset or 0
    assert (padding == (KINDS[kind].offset or 0)).all()  # what stands for zero


def test_where_an_element_lies() -> None:
    """Element 32 q + c of a row's block is nibble q of word c; of 8 bits, 64 q + c byte q of word c."""
    stored = torch.zeros(64, 256, dtype=torch.uint8)
    stored[5, 128 + 2 * 32 + 7] = 9
    packed = pack_values(stored, "fp4")
    assert packed.shape == (1, 2, 64, 32)
    assert packed[0, 1, 5, 7] == 9 << 8
    assert packed.count_nonzero() == 1
    wide = pack_values(stored, "fp8")
    assert wide.shape == (1, 2, 64, 64)
    assert wide[0, 1, 5, 7] == 9 << 8  # 71 = 64 + 7


@pytest.mark.parametrize(("kind", "group", "has_zeros"), FORMATS)
def test_twin(kind: str, group: int, has_zeros: bool | str) -> None:
    weight, wanted = make(kind, group, has_zeros, 70, 200, torch.float32)
    cancelling = 1e-7 if has_zeros == SHIFTS else 0
    torch.testing.assert_close(dequantise_packed_torch(weight).double(), wanted, rtol=1e-6, atol=cancelling)
    x, bias = torch.randn(3, 200), torch.randn(70)
    close(linear_packed_torch(x, weight, bias), x.double() @ wanted.T + bias, 1e-5)
    gated, wanted = make(kind, group, has_zeros, 70, 200, torch.float32, is_gated=True)
    gate, up = (x.double() @ wanted.T).chunk(2, dim=1)
    close(linear_silu_mul_packed_torch(x, gated), gate / (1 + (-gate).exp()) * up, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "out_size", "in_size", "splits"), SHAPES)
@pytest.mark.parametrize(("kind", "group", "has_zeros"), FORMATS)
def test_kernel(
    kind: str,
    group: int,
    has_zeros: bool | str,
    num_rows: int,
    out_size: int,
    in_size: int,
    splits: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_library_product", None)  # the kernel must serve it
    weight, wanted = make(kind, group, has_zeros, out_size, in_size, dtype)
    wide, bias = torch.randn(num_rows, in_size + 16).to(dtype), torch.randn(out_size).to(dtype)
    x, x_there, there = wide[:, :in_size], wide.to(device)[:, :in_size], to(device, weight)
    with overriding("linear_packed", {**TILED, "splits": splits}):
        found = linear_packed(x_there, there, bias.to(device))
        again = linear_packed(x_there, there, bias.to(device))  # finds the counters as the first left them
    close(found, x.double() @ wanted.T + bias.double(), TOLERANCE[dtype])
    assert torch.equal(found, again)
    assert not counters(found.device).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "out_size", "in_size", "splits"), MANY)
def test_kernel_of_many_rows(
    num_rows: int,
    out_size: int,
    in_size: int,
    splits: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_library_product", None)
    weight, wanted = make("int4", 128, True, out_size, in_size, dtype)
    x = torch.randn(num_rows, in_size).to(dtype)
    with overriding("linear_packed", {**TILED, "splits": splits}):
        found = linear_packed(x.to(device), to(device, weight))
    close(found, x.double() @ wanted.T, TOLERANCE[dtype])
    assert not counters(found.device).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "out_size", "in_size", "splits"), [(2, 72, 256, 1), (18, 200, 500, 3)])
@pytest.mark.parametrize(
    ("kind", "group", "has_zeros"),
    [("int4", 128, True), ("fp4", 32, False), ("fp8", 128, False), ("int4", 32, SHIFTS), ("int8", 32, False)],
)
def test_gated_kernel(
    kind: str,
    group: int,
    has_zeros: bool | str,
    num_rows: int,
    out_size: int,
    in_size: int,
    splits: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    weight, wanted = make(kind, group, has_zeros, out_size, in_size, dtype, is_gated=True)
    x = torch.randn(num_rows, in_size).to(dtype)
    with overriding("linear_silu_mul_packed", {**TILED, "block_n": 32, "splits": splits}):
        found = linear_silu_mul_packed(x.to(device), to(device, weight))
    gate, up = (x.double() @ wanted.T).chunk(2, dim=1)
    close(found, gate / (1 + (-gate).exp()) * up, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("kind", "group", "has_zeros"), FORMATS)
def test_written_out(
    kind: str, group: int, has_zeros: bool | str, is_gated: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Each number rounded once, the rows where the library's product wants them."""
    weight, wanted = make(kind, group, has_zeros, 200, 300, dtype, is_gated)
    whole = dequantise_packed(to(device, weight), 0, torch.empty(200, 300, dtype=dtype, device=device))
    tolerance = 2.0**-10 if dtype == torch.float16 else 2.0**-8
    smallest = tolerance * float(wanted.abs().max()) if has_zeros == SHIFTS else 1e-7  # sums cancel
    torch.testing.assert_close(whole.cpu().double(), wanted, rtol=tolerance, atol=smallest)
    piece = dequantise_packed(to(device, weight), 64, torch.empty(128, 300, dtype=dtype, device=device))
    rows = torch.cat([wanted[32:96], wanted[132:196]]) if is_gated else wanted[64:192]
    torch.testing.assert_close(piece.cpu().double(), rows, rtol=tolerance, atol=smallest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 129, 300])
def test_many_rows(num_rows: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's product in pieces, of which the last is smaller."""
    monkeypatch.setattr(module, "_PIECE_BYTES", 128 * 200 * 2)
    x = torch.randn(num_rows, 200).to(dtype)
    weight, wanted = make("int4", 128, True, 320, 200, dtype)
    bias = torch.randn(320).to(dtype)
    found = linear_packed(x.to(device), to(device, weight), bias.to(device))
    assert found.shape == (num_rows, 320)
    if num_rows:
        close(found, x.double() @ wanted.T + bias.double(), TOLERANCE[dtype])
        gated, wanted = make("int4", 128, True, 320, 200, dtype, is_gated=True)
        gate, up = (x.double() @ wanted.T).chunk(2, dim=1)
        product = linear_silu_mul_packed(x.to(device), to(device, gated))
        close(product, gate / (1 + (-gate).exp()) * up, 3 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameter", [{"block_m": 8}, {"join": 1}, {"join": 2}, {"scale_first": 1}])
@pytest.mark.parametrize(
    ("kind", "group", "has_zeros"),
    [("int4", 128, True), ("int4", 64, False), ("int4", 32, True), ("int8", 256, True), ("fp8", 128, False),
     ("fp4", 16, False)],
)  # fmt: skip
def test_what_an_entry_may_say(
    kind: str, group: int, has_zeros: bool, parameter: dict[str, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Fewer rows a program; fewer parts in a product; scales of elements, which round as the library's weights do."""
    weight, wanted = make(kind, group, has_zeros, 130, 640, dtype)
    x = torch.randn(11, 640).to(dtype)
    with overriding("linear_packed", {**TILED, **parameter, "splits": 2}):
        found = linear_packed(x.to(device), to(device, weight))
    close(found, x.double() @ wanted.T, TOLERANCE[dtype])


def test_blackwell_gets_no_tiles_that_compile_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for capability, rows in (((9, 0), 128), ((10, 0), 64), ((12, 0), 64)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert module.tile_rows(128, 128, gpu) == rows
        assert module.tile_rows(128, 64, gpu) == 128
    assert module.tile_rows(128, 128, torch.device("cpu")) == 128


def test_what_cannot_be_packed_is_refused() -> None:
    stored, scales = torch.zeros(64, 256, dtype=torch.uint8), torch.ones(64, 2)
    with pytest.raises(ValueError, match="fp8 weights have no zero points"):
        pack(stored, scales, "fp8", 128, zeros=scales.to(torch.uint8))
    with pytest.raises(ValueError, match="groups of 48"):
        pack(stored, torch.ones(64, 6), "int4", 48)
    with pytest.raises(ValueError, match="groups of 32; fp8 weights"):
        pack(stored, torch.ones(64, 8), "fp8", 32)
    with pytest.raises(ValueError, match=r"scales are \[64, 3\]; expected \[64, 2\]"):
        pack(stored, torch.ones(64, 3), "int4", 128)
    with pytest.raises(ValueError, match="above 2"):
        pack(stored, torch.full((64, 8), 4.0), "fp4", 32)
    with pytest.raises(ValueError, match="not a gated one"):
        linear_silu_mul_packed(torch.zeros(1, 256), pack(stored, scales, "int4", 128))
