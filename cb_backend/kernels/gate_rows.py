"""Rows times the sigmoid of a number each, written where they are wanted: an expert that every token goes through.

Knows rows, not what made them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.launch import (
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    let_next_start,
    needs_twin,
    tl,
)

_BLOCK = 1024


@jit()
def _gate_rows_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    size,
    x_stride,
    gate_stride,
    out_stride,
    HAS_GATE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one row a program."""
    let_next_start(IS_DEPENDENT)
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < size, other=0.0)
    if HAS_GATE:
        gate = tl.load(gate_ptr + row * gate_stride).to(tl.float32)
        x = (x.to(tl.float32) * tl.sigmoid(gate).to(x.dtype).to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + row * out_stride + column, x, mask=column < size)


def gate_rows(x: Tensor, gate: Tensor | None, out: Tensor) -> Tensor:
    """`gate_rows_torch` in one launch; rows of x and out may be strided, and so may the gate."""
    if needs_twin(x):
        return gate_rows_torch(x, gate, out)
    num_tokens, size = x.shape
    if num_tokens:
        _gate_rows_kernel[(num_tokens, -(-size // _BLOCK))](
            x, gate, out, size, x.stride(0), 0 if gate is None else gate.stride(0), out.stride(0),
            HAS_GATE=gate is not None, IS_DEPENDENT=can_overlap(x.device), BLOCK=_BLOCK,
            **dependent_options(x.device, num_tokens),
        )  # fmt: skip
    return out


def gate_rows_torch(x: Tensor, gate: Tensor | None, out: Tensor) -> Tensor:
    """x * sigmoid(gate), or x where there is no gate, into `out`, which is returned.

    x, out [num_tokens, size] of one type; gate [num_tokens]; its sigmoid is rounded to that type.
    """
    return out.copy_(x if gate is None else x * torch.sigmoid(gate.float()).to(x.dtype).unsqueeze(1))
