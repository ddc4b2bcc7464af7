"""Random paged caches whose unused cells are poison, and attention over them in float64, one query at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cb_backend.kernels.fp8 import FP8, to_fp8

STALE_BLOCK = 1_000_000  # what a table entry past a row's end names: following it cannot go unnoticed


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The shapes of one attention case."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    seq_lens: tuple[int, ...]
    window: int = 0
    dtype: torch.dtype = torch.float32
    is_fp8: bool = False  # the cache, with the scales
    key_scale: float = 1.0
    value_scale: float = 1.0
    softcap: float = 0.0

    @property
    def scale(self) -> float:
        return 1.3 * self.head_dim**-0.5

    @property
    def query_scale(self) -> float:
        """What the kernels are given: the scale for keys as they lie in the cache."""
        return self.scale * self.key_scale

    @property
    def tolerance(self) -> float:
        """Of outputs that are averages of unit normals."""
        return {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Paged:
    """A cache filled for `Shapes.seq_lens`; row i's tokens lie in slot slots[i]."""

    kv_cache: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim], NaN where no token was written
    block_tables: Tensor  # [num_slots, max_blocks] int32
    slots: Tensor  # [num_rows] int32
    seq_lens: Tensor  # [num_rows] int32
    keys: list[Tensor]  # a row: [seq_len, num_kv_heads, head_dim], as the cache means them
    values: list[Tensor]


def make_paged(shapes: Shapes, device: torch.device, seed: int = 0) -> Paged:
    """Scatter random rows over shuffled blocks and slots."""
    torch.manual_seed(seed)
    num_rows, block_size = len(shapes.seq_lens), shapes.block_size
    needed = [-(-length // block_size) for length in shapes.seq_lens]
    num_blocks = sum(needed) + 5
    shape = (num_blocks, 2, shapes.num_kv_heads, block_size, shapes.head_dim)
    kv_dtype = FP8 if shapes.is_fp8 else shapes.dtype
    kv_cache = torch.full(shape, float("nan"), dtype=kv_dtype)
    block_tables = torch.full((num_rows + 3, max(needed) + 1), STALE_BLOCK, dtype=torch.int32)
    slots = torch.randperm(num_rows + 3)[:num_rows].int()
    free = torch.randperm(num_blocks - 1) + 1  # block 0 is the null block
    keys, values, used = [], [], 0
    for slot, length, count in zip(slots.tolist(), shapes.seq_lens, needed, strict=True):
        ids = free[used : used + count]
        used += count
        tokens = torch.randn(2, length, shapes.num_kv_heads, shapes.head_dim)
        tokens = to_fp8(8 * tokens) if shapes.is_fp8 else tokens.to(shapes.dtype)  # of the format's whole range
        position = torch.arange(length)
        # [length, 2, num_kv_heads, head_dim]: the indexed dimensions come first
        kv_cache[ids[position // block_size], :, :, position % block_size] = tokens.transpose(0, 1)
        block_tables[slot, :count] = ids.int()
        keys.append(tokens[0].double() * shapes.key_scale)
        values.append(tokens[1].double() * shapes.value_scale)
    return Paged(
        kv_cache=kv_cache.to(device),
        block_tables=block_tables.to(device),
        slots=slots.to(device),
        seq_lens=torch.tensor(shapes.seq_lens, dtype=torch.int32, device=device),
        keys=keys,
        values=values,
    )


def attend(shapes: Shapes, q: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
    """One query [num_heads, head_dim] at `position`, in float64."""
    first = max(0, position - shapes.window + 1) if shapes.window else 0
    group = shapes.num_heads // shapes.num_kv_heads
    outputs = []
    for head in range(shapes.num_heads):
        k, v = keys[first : position + 1, head // group], values[first : position + 1, head // group]
        scores = k @ q[head].double() * shapes.scale
        if shapes.softcap:
            scores = (scores / shapes.softcap).tanh() * shapes.softcap
        outputs.append(torch.softmax(scores, dim=0) @ v)
    return torch.stack(outputs)
