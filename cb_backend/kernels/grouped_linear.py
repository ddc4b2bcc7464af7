"""Products of the rows that go to each expert with its weight: gate and up with the activation, and down.

A block of the plan (`expert_plan`) is up to `block_m` pairs of one expert; a program multiplies them with a tile of
that expert's weight, gathering its rows as it reads them. As in `linear`, the weights are the tall operand. An expert's
blocks follow each other, so the second finds the weights in L2. Blocks beyond those in use end at once, so the grid,
like the plan, is bounded by the shape alone. Knows pairs and weights, not how rows were routed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from cb_backend.kernels.expert_activation import activate_torch, activated
from cb_backend.kernels.expert_plan import ExpertPlan
from cb_backend.kernels.launch import (
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    launch_parameters,
    let_next_start,
    needs_twin,
    next_power_of_2,
    tl,
)


@jit("num_pairs")
def _grouped_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    row_weights_ptr,
    pairs_ptr,
    experts_ptr,
    num_blocks_ptr,
    out_ptr,
    num_pairs,
    out_size,
    in_size,
    x_stride,
    out_stride,  # between tokens
    X_PAIRS: tl.constexpr,  # pairs that share a row of x
    OUT_PAIRS: tl.constexpr,  # pairs of a token in the output, side by side
    HAS_BIAS: tl.constexpr,
    HAS_ROW_WEIGHTS: tl.constexpr,
    IS_GATED: tl.constexpr,  # an expert has 2 * out_size rows: gate, then up
    ACTIVATION: tl.constexpr,
    IS_EVEN: tl.constexpr,  # in_size is a multiple of BLOCK_K
    IS_DEPENDENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N output columns of one block of the plan a program."""
    tile, block = tl.program_id(0), tl.program_id(1)
    n, m, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    let_next_start(IS_DEPENDENT)
    await_previous(IS_DEPENDENT)
    if block >= tl.load(num_blocks_ptr):
        return
    expert = tl.load(experts_ptr + block).to(tl.int64)
    pair = tl.load(pairs_ptr + block * BLOCK_M + m)
    is_pair = pair < num_pairs
    pair = tl.where(is_pair, pair, 0)
    rows = out_size * 2 if IS_GATED else out_size  # of an expert
    # Columns past the last are the last again: their sums are not stored, and no load needs a mask for them.
    n_there = tl.minimum(n, out_size - 1)
    weight_tile_ptr = weight_ptr + (expert * rows + n_there)[:, None] * in_size + k[None, :]
    up_shift = tl.cast(out_size, tl.int64) * in_size
    x_tile_ptr = x_ptr + (pair // X_PAIRS).to(tl.int64)[:, None] * x_stride + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for offset in range(0, in_size, BLOCK_K):
        if IS_EVEN:
            weight = tl.load(weight_tile_ptr + offset)  # [BLOCK_N, BLOCK_K]
            x = tl.load(x_tile_ptr + offset, mask=is_pair[:, None], other=0.0)  # [BLOCK_M, BLOCK_K]
        else:
            is_inside = (offset + k < in_size)[None, :]
            weight = tl.load(weight_tile_ptr + offset, mask=is_inside, other=0.0)
            x = tl.load(x_tile_ptr + offset, mask=is_pair[:, None] & is_inside, other=0.0)
        if IS_GATED:
            if IS_EVEN:
                up = tl.load(weight_tile_ptr + up_shift + offset)
            else:
                up = tl.load(weight_tile_ptr + up_shift + offset, mask=is_inside, other=0.0)
            acc_up = tl.dot(up, tl.trans(x), acc_up, input_precision="ieee")
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * rows + n_there).to(tl.float32)[:, None]
        if IS_GATED:
            acc_up += tl.load(bias_ptr + expert * rows + out_size + n_there).to(tl.float32)[:, None]
    if IS_GATED:
        acc = activated(acc, acc_up, out_ptr.dtype.element_ty, ACTIVATION)
    if HAS_ROW_WEIGHTS:
        acc *= tl.load(row_weights_ptr + pair)[None, :]
    row = (pair // OUT_PAIRS).to(tl.int64) * out_stride + (pair % OUT_PAIRS).to(tl.int64) * out_size
    is_stored = (n < out_size)[:, None] & is_pair[None, :]
    tl.store(out_ptr + n[:, None] + row[None, :], acc.to(out_ptr.dtype.element_ty), mask=is_stored)


def grouped_gate_up(
    x: Tensor, weight: Tensor, plan: ExpertPlan, top_k: int, activation: str = "silu", bias: Tensor | None = None
) -> Tensor:
    """`grouped_gate_up_torch` in one launch; rows of x may be strided."""
    if needs_twin(x):
        return grouped_gate_up_torch(x, weight, plan, top_k, activation, bias)
    out = x.new_empty(plan.num_pairs, weight.shape[1] // 2)
    if plan.num_pairs:
        _launch("grouped_gate_up", x, weight, plan, bias, None, out, x_pairs=top_k, activation=activation)
    return out


def grouped_down(
    x: Tensor, weight: Tensor, plan: ExpertPlan, row_weights: Tensor, out: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`grouped_down_torch` in one launch."""
    if needs_twin(x):
        return grouped_down_torch(x, weight, plan, row_weights, out, bias)
    if plan.num_pairs:
        _launch("grouped_down", x, weight, plan, bias, row_weights, out, out_pairs=row_weights.shape[1])
    return out


def _launch(
    op: str,
    x: Tensor,
    weight: Tensor,
    plan: ExpertPlan,
    bias: Tensor | None,
    row_weights: Tensor | None,
    out: Tensor,
    *,
    x_pairs: int = 1,
    out_pairs: int = 1,
    activation: str | None = None,
) -> None:
    in_size, device = x.shape[1], x.device
    out_size = weight.shape[1] // (1 if activation is None else 2)
    parameters = grouped_parameters(op, plan, n=out_size, k=in_size, bits=16, device=device)
    block_n, block_k = parameters["block_n"], parameters["block_k"]
    _grouped_linear_kernel[(-(-out_size // block_n), plan.bound)](
        x, weight, bias, row_weights, plan.pairs, plan.experts, plan.num_blocks, out,
        plan.num_pairs, out_size, in_size, x.stride(0), out.stride(0),
        X_PAIRS=x_pairs, OUT_PAIRS=out_pairs, HAS_BIAS=bias is not None, HAS_ROW_WEIGHTS=row_weights is not None,
        IS_GATED=activation is not None, ACTIVATION=activation, IS_EVEN=in_size % block_k == 0,
        IS_DEPENDENT=can_overlap(device), BLOCK_M=plan.block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=parameters["num_warps"], num_stages=parameters["num_stages"],
        **dependent_options(device, plan.num_pairs // max(x_pairs, out_pairs)),
    )  # fmt: skip


def grouped_parameters(op: str, plan: ExpertPlan, *, n: int, k: int, bits: int, device: torch.device) -> dict[str, int]:
    """Launch parameters for a shape of weight, rows of a block (`m`) and number of pairs (`pairs`, rounded up)."""
    pairs = next_power_of_2(plan.num_pairs)
    return launch_parameters(op, device, n=n, k=k, e=plan.num_experts, m=plan.block_m, pairs=pairs, bits=bits)


def grouped_gate_up_torch(
    x: Tensor, weight: Tensor, plan: ExpertPlan, top_k: int, activation: str = "silu", bias: Tensor | None = None
) -> Tensor:
    """What each pair's expert makes of its token, activated: [num_pairs, intermediate_size].

    x [num_tokens, hidden_size]; weight [num_experts, 2 * intermediate_size, hidden_size], gate above up; bias
    [num_experts, 2 * intermediate_size]; activation: see `activate_torch`. Rows of pairs that are in no block are not
    written.
    """
    return gate_up_by(plain_product(weight, bias), x, plan, top_k, weight.shape[1] // 2, activation)


def grouped_down_torch(
    x: Tensor, weight: Tensor, plan: ExpertPlan, row_weights: Tensor, out: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Each pair's row through its expert's second weight, times the pair's weight, written into `out`.

    x [num_pairs, intermediate_size]; weight [num_experts, hidden_size, intermediate_size]; bias [num_experts,
    hidden_size]; row_weights [num_tokens, top_k] float32; out [num_tokens, at least top_k, hidden_size], contiguous,
    of which the pairs' parts are the first. Parts of pairs that are in no block are left as they are. Returns `out`.
    """
    return down_by(plain_product(weight, bias), x, plan, row_weights, out)


Product = Callable[[Tensor, int], Tensor]  # rows [n, in_size] through an expert's weight and bias: [n, rows of it]


def plain_product(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda x, expert: functional.linear(x, weight[expert], None if bias is None else bias[expert])


def gate_up_by(
    product: Product, x: Tensor, plan: ExpertPlan, top_k: int, intermediate_size: int, activation: str
) -> Tensor:
    """`grouped_gate_up_torch` for weights of any kind."""
    out = x.new_empty(plan.num_pairs, intermediate_size)
    for expert, pairs in plan.by_expert():
        out[pairs] = activate_torch(product(x[pairs // top_k], expert), activation)
    return out


def down_by(product: Product, x: Tensor, plan: ExpertPlan, row_weights: Tensor, out: Tensor) -> Tensor:
    """`grouped_down_torch` for weights of any kind."""
    top_k = row_weights.shape[1]
    for expert, pairs in plan.by_expert():
        weighed = product(x[pairs], expert).float() * row_weights.flatten()[pairs].unsqueeze(1)
        out[pairs // top_k, pairs % top_k] = weighed.to(out.dtype)
    return out
