"""The gated activations of an MLP: `silu(gate) * up` and `gelu(gate) * up`, gate and up side by side in one row.

Knows rows, not the projections before and after it.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from cb_backend.kernels.launch import (
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    launch_parameters,
    let_next_start,
    needs_twin,
    tl,
)


@jit()
def gated(gate, up, dtype: tl.constexpr, IS_GELU: tl.constexpr = False):
    """silu(gate) * up, or gelu(gate) * up, of fp32 sums or of what they are rounded to; fp32.

    Rounded where separate kernels would round, so that a product's bits do not depend on what it is fused with; nothing
    is left to the compiler that it may fuse in one kernel and not in another.
    """
    gate = gate.to(dtype).to(tl.float32)
    if IS_GELU:  # x (1 + tanh(y)) / 2 is x sigmoid(2 y)
        inner = 2 * 0.7978845608028654 * tl.fma(0.044715 * gate * gate, gate, gate)
    else:
        inner = gate
    activated = (gate * tl.sigmoid(inner)).to(dtype).to(tl.float32)
    return activated * up.to(dtype).to(tl.float32)


@jit()
def _silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    row_stride,
    intermediate_size,
    IS_GELU: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one row a program."""
    let_next_start(IS_DEPENDENT)
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < intermediate_size
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=is_inside, other=0.0)
    up = tl.load(gate_up_ptr + row * row_stride + intermediate_size + column, mask=is_inside, other=0.0)
    product = gated(gate, up, gate.dtype, IS_GELU)
    tl.store(out_ptr + row * intermediate_size + column, product.to(gate.dtype), mask=is_inside)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """`silu_mul_torch` in one launch; rows may be strided."""
    return silu_mul_torch(gate_up, out) if needs_twin(gate_up) else _launch(gate_up, out, is_gelu=False)


def gelu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """`gelu_mul_torch` in one launch; rows may be strided."""
    return gelu_mul_torch(gate_up, out) if needs_twin(gate_up) else _launch(gate_up, out, is_gelu=True)


def _launch(gate_up: Tensor, out: Tensor | None, *, is_gelu: bool) -> Tensor:
    num_tokens, intermediate_size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = gate_up.new_empty(num_tokens, intermediate_size)
    if num_tokens == 0:
        return out
    parameters = launch_parameters("silu_mul", gate_up.device)
    block = parameters["block"]
    _silu_mul_kernel[(num_tokens, -(-intermediate_size // block))](
        gate_up, out, gate_up.stride(0), intermediate_size,
        IS_GELU=is_gelu, IS_DEPENDENT=can_overlap(out.device), BLOCK=block,
        num_warps=parameters["num_warps"], **dependent_options(out.device, num_tokens),
    )  # fmt: skip
    return out


def silu_mul_torch(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """gate_up [num_tokens, 2 * intermediate_size], gate first. Returns [num_tokens, intermediate_size].

    silu is taken in fp32 and rounded to the input's type before the product, as in a framework's two-step version.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    product = functional.silu(gate) * up
    return product if out is None else out.copy_(product)


def gelu_mul_torch(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """As `silu_mul_torch`, with gelu in its approximation by tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    product = functional.gelu(gate, approximate="tanh") * up
    return product if out is None else out.copy_(product)
