"""Weights of 4 and 8 bits: how they lie in a device's memory, and what they stand for.

A packed weight [out_size, in_size] is cut into tiles of 64 rows and 128 columns, each one piece of memory, so that a
program reads whole lines. Inside a row's 128 elements, element `128 / n * q + c` is part q of 16-bit word c, where n is
the number of elements a word holds (4 of 4 bits, 2 of 8): one shift and mask gives a tensor of neighbours, and no
shuffle is needed. Both sizes are padded with zero weights. Scales are [in_size / group, out_size]. Knows numbers and
where they lie, not the files they come from (`models`), nor products (`linear_packed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TILE_ROWS = 64
TILE_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class PackedKind:
    """One way to store an element."""

    bits: int
    offset: int | None = None  # integers: what is stored is value + offset; None: a float's bits
    has_zeros: bool = False  # an integer may have a zero point of its own a group and row, stored like the values

    @property
    def per_word(self) -> int:
        """Elements in 16 bits."""
        return 16 // self.bits


# fp4 is e2m1. As bfloat16 bits its exponent and mantissa are a number 2**126 too small, which the scale makes good; so
# little that e2m1 times a power of two, or times an e4m3 number, is exact in bfloat16.
KINDS = {
    "int4": PackedKind(4, offset=8, has_zeros=True),
    "int8": PackedKind(8, offset=128, has_zeros=True),
    "fp8": PackedKind(8),
    "fp4": PackedKind(4),
}
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the three bits below the sign
FP4_SHIFT = 126
MAX_FP4_SCALE_EXPONENT = 1  # 2 ** (126 + 1) is the largest power of two that bfloat16 holds
_NARROW_UNIT, _MAX_FLOAT16 = 2.0**-12, 65504.0
MIN_GROUP = {"int4": 32, "int8": 32, "fp8": 128, "fp4": 16}


class StoredWeight(NamedTuple):
    """Not packed yet: element [n, k] is (values[n, k] - zero point) * scales[n, k // group] * global_scale.

    Or, of integers with shifts, (values[n, k] * scales[n, k // group] + shifts[n, k // group]) * global_scale.
    """

    values: Tensor  # [out_size, in_size] uint8: int4 as value + 8, int8 as value + 128, fp8 and fp4 their bits
    scales: Tensor  # [out_size, groups]
    zeros: Tensor | None  # the same shape, uint8, stored like the values
    kind: str  # of KINDS
    group: int
    global_scale: float = 1.0
    order: Tensor | None = None  # [in_size]: column j of `values` is column order[j] of the weight
    shifts: Tensor | None = None  # [out_size, groups], of the scales' dtype; then there are no zeros


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight of `size` (out_size, in_size): element [n, k] is value[n, k] * scales[k // group, n] * global_scale.

    An integer's value is what is stored minus 8 (int4) or 128 (int8), or minus its zero point where there are any.
    Where there are shifts, its value is what is stored, and the shift is added before the global scale.
    """

    values: Tensor  # [out_tiles, in_tiles, 64, 32 | 64] int16
    scales: Tensor  # [in_tiles * 128 / group (at least 1), out_tiles * 64] of the inputs' dtype, or float32
    zeros: Tensor | None  # the same shape, uint8
    kind: str  # of KINDS
    group: int  # elements along in_size that share a scale: a power of two, or in_size rounded up to 128
    size: tuple[int, int]
    global_scale: float = 1.0
    is_gated: bool = False  # rows 2j and 2j + 1 are row j of the gate's and of the up projection's weight
    shifts: Tensor | None = None  # as the scales: shape and dtype

    @property
    def num_bytes(self) -> int:
        others = (each.nbytes for each in (self.zeros, self.shifts) if each is not None)
        return self.values.nbytes + self.scales.nbytes + sum(others)


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def packed_bytes(out_size: int, in_size: int, kind: str, group: int, bytes_a_group: int) -> int:
    """`PackedWeight.num_bytes` of what `pack` makes of such a weight. group: -1: one a row; bytes_a_group: of a scale
    and what comes with it."""
    in_padded, out_padded = padded(in_size, TILE_COLUMNS), padded(out_size, TILE_ROWS)
    group = in_padded if group == -1 or group >= in_size else group
    num_groups = -(-in_padded // group) if in_padded else 0  # a device's share may be nothing
    return out_padded * (in_padded * KINDS[kind].bits // 8 + num_groups * bytes_a_group)


def pack_values(values: Tensor, kind: str) -> Tensor:
    """Stored elements [out_size, in_size] (uint8, of 4 or 8 bits) as tiles [out_tiles, in_tiles, 64, words] int16.

    Padding holds what stands for zero. The inverse is `unpack_values`.
    """
    number = KINDS[kind]
    out_size, in_size = values.shape
    whole = values.new_full((padded(out_size, TILE_ROWS), padded(in_size, TILE_COLUMNS)), number.offset or 0)
    whole[:out_size, :in_size] = values
    per_word = number.per_word
    words = TILE_COLUMNS // per_word
    # [out_tiles, 64, in_tiles, per_word, words]: part q of a word is the q-th run of neighbours
    parts = whole.view(whole.shape[0] // TILE_ROWS, TILE_ROWS, whole.shape[1] // TILE_COLUMNS, per_word, words)
    packed = torch.zeros(*parts.shape[:3], words, dtype=torch.int32, device=values.device)
    for q in range(per_word):
        packed |= parts[..., q, :].to(torch.int32) << (number.bits * q)
    return packed.to(torch.int16).permute(0, 2, 1, 3).contiguous()  # wraps: the upper half is negative


def unpack_values(packed: Tensor, kind: str) -> Tensor:
    """Stored elements [out_tiles * 64, in_tiles * 128] uint8, of what `pack_values` made."""
    number = KINDS[kind]
    words = packed.permute(0, 2, 1, 3).to(torch.int32) & 0xFFFF  # [out_tiles, 64, in_tiles, words]
    parts = [(words >> (number.bits * q)) & (2**number.bits - 1) for q in range(number.per_word)]
    stored = torch.stack(parts, dim=3).to(torch.uint8)
    return stored.reshape(packed.shape[0] * TILE_ROWS, packed.shape[1] * TILE_COLUMNS)


def pack(
    stored: Tensor,
    scales: Tensor,
    kind: str,
    group: int,
    zeros: Tensor | None = None,
    *,
    global_scale: float = 1.0,
    is_gated: bool = False,
    shifts: Tensor | None = None,
) -> PackedWeight:
    """A weight from its stored elements.

    stored: [out_size, in_size] uint8; int4 as value + 8, int8 as value + 128, fp8 and fp4 as their bits.
    scales: [out_size, groups], groups the number that in_size needs; zeros of the same shape, uint8, stored likewise;
    shifts of the same shape and dtype.
    is_gated: the first half of the rows are the gate's, the second the up projection's; they are interleaved.
    Raises `ValueError` for a kind without zero points or shifts that has some, a group that the kind's kernels cannot
    take, sizes that do not fit, and a scale beyond what the kind holds.
    """
    out_size, in_size = stored.shape
    in_padded, out_padded = padded(in_size, TILE_COLUMNS), padded(out_size, TILE_ROWS)
    # Shifts are those of groups, even where one is all there is.
    group = in_padded if group == -1 or (group >= in_size and shifts is None) else group
    if (zeros is not None or shifts is not None) and not KINDS[kind].has_zeros:
        raise ValueError(f"{kind} weights have no zero points")
    if group != in_padded and (group < MIN_GROUP[kind] or group & (group - 1)):
        raise ValueError(f"groups of {group}; {kind} weights have groups of a power of two from {MIN_GROUP[kind]} on")
    num_groups = -(-in_padded // group)
    if scales.shape != (out_size, -(-in_size // group)):
        raise ValueError(f"scales are {list(scales.shape)}; expected {[out_size, -(-in_size // group)]}")
    if kind == "fp4":
        if not bool((scales.abs() <= 2.0**MAX_FP4_SCALE_EXPONENT).all()):
            raise ValueError(f"a scale is above {2.0**MAX_FP4_SCALE_EXPONENT:g}, the largest that is served")
        scales = scales.float() * 2.0**FP4_SHIFT
    if is_gated:
        order = torch.arange(out_size, device=stored.device).view(2, -1).t().reshape(-1)
        stored, scales = stored[order], scales[order]
        zeros = None if zeros is None else zeros[order]
        shifts = None if shifts is None else shifts[order]
    dtype = torch.bfloat16 if kind == "fp4" else scales.dtype

    def by_group(each: Tensor, kept: torch.dtype) -> Tensor:
        whole = torch.zeros(num_groups, out_padded, dtype=kept, device=each.device)
        whole[: each.shape[1], :out_size] = each.t()
        return whole

    return PackedWeight(
        pack_values(stored, kind),
        by_group(scales, dtype),
        None if zeros is None else by_group(zeros, torch.uint8),
        kind,
        group,
        (out_size, in_size),
        global_scale,
        is_gated,
        None if shifts is None else by_group(shifts, dtype),
    )


def narrowed(stored: StoredWeight, dtype: torch.dtype) -> StoredWeight:
    """The weight with scales and shifts of 16 bits, for inputs of `dtype`, where those are of 16 and these of 32.

    They are rounded to float16, 11 bits, in units of 2^-12, so that small ones are normal numbers too. Larger ones than
    float16 holds stay as they are.
    """
    scales, shifts = stored.scales, stored.shifts
    if shifts is None or dtype == torch.float32 or scales.dtype != torch.float32:
        return stored
    if max(float(each.abs().max()) for each in (scales, shifts)) >= _MAX_FLOAT16 * _NARROW_UNIT:
        return stored
    scales, shifts = ((each / _NARROW_UNIT).half() for each in (scales, shifts))
    return stored._replace(scales=scales, shifts=shifts, global_scale=stored.global_scale * _NARROW_UNIT)


def exact_values(stored: Tensor, kind: str) -> Tensor:
    """What stored elements (uint8) stand for, zero points apart, in float32."""
    if kind == "fp8":
        return stored.view(torch.float8_e4m3fn).float()
    if kind == "fp4":
        sizes = torch.tensor(FP4_VALUES, device=stored.device)[(stored & 7).long()]
        return torch.where(stored >= 8, -sizes, sizes)
    offset = KINDS[kind].offset
    assert offset is not None
    return stored.float() - offset


def dequantise_packed_torch(weight: PackedWeight) -> Tensor:
    """The weight's numbers [out_size, in_size] in float32; of a gated one, the gate's rows and then the others."""
    out_size, in_size = weight.size
    stored = unpack_values(weight.values, weight.kind)
    values = exact_values(stored, weight.kind)
    if weight.zeros is not None:
        values += (KINDS[weight.kind].offset or 0) - _a_column(weight.zeros.float(), weight, values.shape[1])
    scales = weight.scales.float() * (2.0**-FP4_SHIFT if weight.kind == "fp4" else 1.0)
    if weight.shifts is None:
        values *= _a_column(scales, weight, values.shape[1]) * weight.global_scale
    else:
        values = (values + (KINDS[weight.kind].offset or 0)) * _a_column(scales, weight, values.shape[1])
        values += _a_column(weight.shifts.float(), weight, values.shape[1])
        values *= weight.global_scale
    rows = values[:out_size, :in_size]
    return rows if not weight.is_gated else rows.view(-1, 2, in_size).transpose(0, 1).reshape(out_size, in_size)


def _a_column(by_group: Tensor, weight: PackedWeight, in_padded: int) -> Tensor:
    """[groups, out] to [out, in_padded]."""
    return by_group.t().repeat_interleave(min(weight.group, in_padded), dim=1)[:, :in_padded]
