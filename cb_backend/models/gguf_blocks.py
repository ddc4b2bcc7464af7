"""A GGUF file's blocks as stored elements: quantised matrices that are served in the file's own bits.

Each row of a matrix is a run of blocks. A block of the older kinds has 32 elements and a scale d, some also a minimum
m: element * d, or element * d + m. One of the K kinds has 256 elements in eight groups of 32, whose scales and minima
have 6 bits and are multiples of the block's own d and dmin. What no kernel takes (groups of 16, other bits) is not
here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cb_backend.kernels.packed import KINDS, StoredWeight

GROUP = 32


class BlockKind(NamedTuple):
    """One way to store a block."""

    num_elements: int
    num_bytes: int
    kind: str  # of kernels.packed.KINDS
    read: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]  # blocks -> elements, scales, shifts
    has_shifts: bool = False

    def row_bytes(self, in_size: int) -> int:
        """Of a row of in_size elements, which are whole blocks."""
        return in_size // self.num_elements * self.num_bytes


def read_blocks(kind: str, rows: Tensor) -> StoredWeight:
    """rows: uint8 [out_size, bytes of a row], of a kind in `BLOCK_KINDS`."""
    block = BLOCK_KINDS[kind]
    out_size = rows.shape[0]
    values, scales, shifts = block.read(rows.view(out_size, -1, block.num_bytes))
    if shifts is not None:
        shifts = shifts.reshape(out_size, -1)
    return StoredWeight(
        values.reshape(out_size, -1), scales.reshape(out_size, -1), None, block.kind, GROUP, shifts=shifts
    )


def _float16(blocks: Tensor, start: int) -> Tensor:
    """The number at a byte of each block: [rows, blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _halves(quarters: Tensor) -> Tensor:
    """Bytes [..., n] as elements [..., 2 n]: all low nibbles, then all high ones."""
    return torch.cat((quarters & 15, quarters >> 4), dim=-1)


def _fifth_bits(words: Tensor) -> Tensor:
    """Bit i of each 4 bytes, as 0 or 16: [..., 4] to [..., 32]."""
    bits = (words.unsqueeze(-1) >> torch.arange(8, device=words.device)) & 1
    return (bits << 4).flatten(-2).to(torch.uint8)


def _offset(kind: str) -> int:
    return KINDS[kind].offset or 0


def _read_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    return _halves(blocks[..., 2:]), _float16(blocks, 0), None


def _read_q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _halves(blocks[..., 4:]), _float16(blocks, 0), _float16(blocks, 2)


def _read_q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    elements = _halves(blocks[..., 6:]) + _fifth_bits(blocks[..., 2:6])
    return elements + (_offset("int8") - 16), _float16(blocks, 0), None


def _read_q5_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _halves(blocks[..., 8:]) + _fifth_bits(blocks[..., 4:8]), _float16(blocks, 0), _float16(blocks, 2)


def _read_q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    return blocks[..., 2:] ^ 128, _float16(blocks, 0), None  # a signed byte + 128


def _group_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and shifts of a K block's eight groups, float32 [..., 8], from its 12 bytes of 6 bits each."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return _float16(blocks, 0).float() * scales.float(), -_float16(blocks, 2).float() * minima.float()


def _read_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (_halves(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2), *_group_scales(blocks))


def _read_q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    elements = _halves(blocks[..., 48:].unflatten(-1, (4, 32)))  # [..., 4, 64]: groups 2 j and 2 j + 1
    shifts = torch.arange(8, device=blocks.device).unsqueeze(-1)
    fifth = ((blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1) << 4  # bit g of byte i: element i of group g
    return (elements.unflatten(-1, (2, 32)).flatten(-3, -2) + fifth).to(torch.uint8).flatten(-2), *_group_scales(blocks)


BLOCK_KINDS = {
    "Q4_0": BlockKind(32, 18, "int4", _read_q4_0),
    "Q4_1": BlockKind(32, 20, "int4", _read_q4_1, has_shifts=True),
    "Q5_0": BlockKind(32, 22, "int8", _read_q5_0),
    "Q5_1": BlockKind(32, 24, "int8", _read_q5_1, has_shifts=True),
    "Q8_0": BlockKind(32, 34, "int8", _read_q8_0),
    "Q4_K": BlockKind(256, 144, "int4", _read_q4_k, has_shifts=True),
    "Q5_K": BlockKind(256, 176, "int8", _read_q5_k, has_shifts=True),
}
