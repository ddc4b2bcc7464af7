"""Products of each expert's rows with weights of 4 and 8 bits: as `grouped_linear`, with tiles as in `linear_packed`.

All numbers of rows go through one kernel: weights are widened in registers, also for prompts, as writing out all
experts' weights would take longer than the products of a layer. Knows pairs and weights, not how rows were routed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cb_backend.kernels.expert_activation import activated
from cb_backend.kernels.expert_plan import ExpertPlan
from cb_backend.kernels.exponents import four_powers, scales_of
from cb_backend.kernels.grouped_linear import Product, down_by, gate_up_by, grouped_parameters
from cb_backend.kernels.launch import (
    IS_INTERPRETING,
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    let_next_start,
    needs_twin,
    tl,
)
from cb_backend.kernels.linear_packed import linear_packed_torch, tile_rows
from cb_backend.kernels.linear_packed_kernel import block_scales
from cb_backend.kernels.packed import KINDS, TILE_COLUMNS, PackedWeight
from cb_backend.kernels.packed_tile import each_number, each_of_four, tile_product
from cb_backend.kernels.split_sums import MAX_TILES, counters, sum_splits


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """A `PackedWeight` for each expert, all of one kind and size: its tensors have the experts' dimension first."""

    values: Tensor  # [num_experts, out_tiles, in_tiles, 64, 32 | 64] int16
    scales: Tensor  # [num_experts, groups, out_tiles * 64]; or of int32, see `exponents`, with a fourth of the groups
    zeros: Tensor | None
    kind: str
    group: int
    size: tuple[int, int]  # of an expert's
    is_gated: bool = False

    def of(self, expert: int) -> PackedWeight:
        """Views, but for scales that are kept as exponents."""
        zeros = None if self.zeros is None else self.zeros[expert]
        scales = scales_of(self.scales[expert]) if self.has_exponents else self.scales[expert]
        return PackedWeight(
            self.values[expert], scales, zeros, self.kind, self.group, self.size, is_gated=self.is_gated
        )

    @property
    def has_exponents(self) -> bool:
        return self.scales.dtype == torch.int32

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    @property
    def bits(self) -> int:
        return KINDS[self.kind].bits


@jit("num_pairs")
def _grouped_packed_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    row_weights_ptr,
    pairs_ptr,
    experts_ptr,
    num_blocks_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_pairs,
    out_size,  # rows of an expert's weight
    in_size,
    num_tiles,  # of 128 columns, no fewer than splits
    x_stride,
    out_stride,  # between tokens
    values_stride,  # between experts, in the same order as the tensors
    scales_stride,
    scale_stride,  # between groups
    X_PAIRS: tl.constexpr,  # pairs that share a row of x
    OUT_PAIRS: tl.constexpr,  # pairs of a token in the output, side by side
    KIND: tl.constexpr,
    WORDS: tl.constexpr,  # 16-bit words of a row's 128 elements
    GROUPS: tl.constexpr,  # of 128 columns; 0: one for all of in_size
    GROUP_BLOCKS: tl.constexpr,  # blocks of 128 columns in a group, where it has more than one
    HAS_EXPONENTS: tl.constexpr,  # a word a row and block of columns in the place of its four scales
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROW_WEIGHTS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # rows of the weight are gate and up in turn; None: there is none
    IS_EVEN: tl.constexpr,  # in_size is a multiple of 128
    HAS_ASSEMBLY: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    SPLITS: tl.constexpr,  # programs that share the sums of a tile
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_N rows of an expert's weight with one block of the plan, over one split of the input size, a program."""
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, m, c = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, WORDS)
    let_next_start(IS_DEPENDENT)
    await_previous(IS_DEPENDENT)
    if block >= tl.load(num_blocks_ptr):
        return
    expert = tl.load(experts_ptr + block).to(tl.int64)
    pair = tl.load(pairs_ptr + block * BLOCK_M + m)
    is_pair = pair < num_pairs
    pair = tl.where(is_pair, pair, 0)
    # Rows past the last are the last again: their sums are not stored, and no load needs a mask for them.
    n_there = tl.minimum(n, out_size - 1)
    tile_words = tl.cast(num_tiles, tl.int64) * (64 * WORDS)
    values_row_ptr = values_ptr + expert * values_stride + (n_there // 64) * tile_words + (n_there % 64) * WORDS
    scales_ptr += expert * scales_stride
    SCALE: tl.constexpr = scales_ptr.dtype.element_ty
    FIRST_GROUPS: tl.constexpr = 1 if HAS_EXPONENTS else GROUPS  # words lie as the scales of groups of 128 would
    start = split * num_tiles // SPLITS
    end = (split + 1) * num_tiles // SPLITS
    scales = block_scales(scales_ptr, scale_stride, n_there, start, FIRST_GROUPS, GROUP_BLOCKS)
    exponents, second, zeros = scales[0], scales, scales
    if GROUPS == 8:
        second = block_scales(scales_ptr + scale_stride, scale_stride, n_there, start, GROUPS, GROUP_BLOCKS)
    if HAS_ZEROS:
        zeros_ptr += expert * scales_stride
        zeros = block_scales(zeros_ptr, scale_stride, n_there, start, GROUPS, GROUP_BLOCKS)
    x_row_ptr = x_ptr + (pair // X_PAIRS).to(tl.int64)[:, None] * x_stride
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    IS_SCALED_AFTER: tl.constexpr = KIND != "fp4" and GROUPS > 0
    RUN: tl.constexpr = 128 // WORDS // max(GROUPS, 1) if IS_SCALED_AFTER else 128 // WORDS
    for k in range(start, end):
        words = tl.load(values_row_ptr[:, None] + k * (64 * WORDS) + c[None, :])
        if HAS_EXPONENTS:
            # Spread over the columns before it is taken apart: between threads it moves once, not four times.
            scale = four_powers(tl.broadcast_to(exponents[:, None], [BLOCK_N, WORDS]))
            second_scale = scale
        else:
            scale, second_scale = each_of_four(scales, n_there, SCALE), each_of_four(second, n_there, SCALE)
        zero = each_of_four(zeros, n_there, tl.uint8)
        # The next block's scales are asked for now: loads this narrow are not pipelined by the compiler.
        following = tl.minimum(k + 1, end - 1)
        next_scales, next_second, next_zeros = scales, second, zeros
        if HAS_EXPONENTS:
            exponents = tl.load(scales_ptr + following * scale_stride + n_there)
        elif GROUPS > 0:
            next_scales = block_scales(scales_ptr, scale_stride, n_there, following, GROUPS, GROUP_BLOCKS)
            if GROUPS == 8:
                next_second = block_scales(
                    scales_ptr + scale_stride, scale_stride, n_there, following, GROUPS, GROUP_BLOCKS
                )
            if HAS_ZEROS:
                next_zeros = block_scales(zeros_ptr, scale_stride, n_there, following, GROUPS, GROUP_BLOCKS)
        acc = tile_product(
            acc, x_row_ptr + k * 128, is_pair[:, None], in_size - k * 128, words, scale, zero, second_scale,
            KIND, WORDS, GROUPS, IS_SCALED_AFTER, RUN, RUN, HAS_ZEROS, IS_EVEN, HAS_ASSEMBLY,
        )  # fmt: skip
        scales, second, zeros = next_scales, next_second, next_zeros
    if SPLITS > 1:
        offset = pair[None, :].to(tl.int64) * out_size + n[:, None]
        is_kept, stride = (n < out_size)[:, None] & is_pair[None, :], num_pairs.to(tl.int64) * out_size
        tl.store(partial_ptr + split * stride + offset, acc, mask=is_kept)
        # The barrier and the atomic make this program's sums visible before the count that announces them.
        tl.debug_barrier()
        counter_ptr += block * tl.num_programs(0) + tile
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(counter_ptr, 0)  # as the next launch wants it
        acc = sum_splits(partial_ptr, offset, is_kept, stride, SPLITS)
    if GROUPS == 0:
        factor = each_number(scales[0], n_there, SCALE).to(tl.float32)
        factor *= 1.1754943508222875e-38 if KIND == "fp4" else 1.0
        acc *= factor[:, None]
    if HAS_BIAS:
        place = n_there
        if ACTIVATION is not None:  # the bias has the gate's before the others
            place = n_there % 2 * (out_size // 2) + n_there // 2
        acc += tl.load(bias_ptr + expert * out_size + place).to(tl.float32)[:, None]
    weight = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_ROW_WEIGHTS:
        weight = tl.load(row_weights_ptr + pair)
    out_row = (pair // OUT_PAIRS).to(tl.int64) * out_stride
    dtype = out_ptr.dtype.element_ty
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(tl.trans(acc), [BLOCK_M, BLOCK_N // 2, 2]))
        half = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        is_stored = is_pair[:, None] & (half < out_size // 2)[None, :]
        product = activated(gate, up, dtype, ACTIVATION)
        tl.store(out_ptr + out_row[:, None] + half[None, :], product.to(dtype), mask=is_stored)
    else:
        out_row += (pair % OUT_PAIRS).to(tl.int64) * out_size
        is_stored = (n < out_size)[:, None] & is_pair[None, :]
        tl.store(out_ptr + n[:, None] + out_row[None, :], (acc * weight[None, :]).to(dtype), mask=is_stored)


def grouped_gate_up_packed(
    x: Tensor, weight: PackedExperts, plan: ExpertPlan, top_k: int, activation: str = "silu", bias: Tensor | None = None
) -> Tensor:
    """`grouped_gate_up_packed_torch` in one launch; rows of x may be strided."""
    if needs_twin(x):
        return grouped_gate_up_packed_torch(x, weight, plan, top_k, activation, bias)
    out = x.new_empty(plan.num_pairs, weight.size[0] // 2)
    if plan.num_pairs:
        _launch("grouped_gate_up", x, weight, plan, bias, None, out, x_pairs=top_k, activation=activation)
    return out


def grouped_down_packed(
    x: Tensor, weight: PackedExperts, plan: ExpertPlan, row_weights: Tensor, out: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`grouped_down_packed_torch` in one launch."""
    if needs_twin(x):
        return grouped_down_packed_torch(x, weight, plan, row_weights, out, bias)
    if plan.num_pairs:
        _launch("grouped_down", x, weight, plan, bias, row_weights, out, out_pairs=row_weights.shape[1])
    return out


def _launch(
    op: str,
    x: Tensor,
    weight: PackedExperts,
    plan: ExpertPlan,
    bias: Tensor | None,
    row_weights: Tensor | None,
    out: Tensor,
    *,
    x_pairs: int = 1,
    out_pairs: int = 1,
    activation: str | None = None,
) -> None:
    (out_size, in_size), device = weight.size, x.device
    num_tiles, words = weight.values.shape[2], weight.values.shape[4]
    n = out_size if activation is None else out_size // 2
    parameters = grouped_parameters(op, plan, n=n, k=in_size, bits=weight.bits, device=device)
    block_n = tile_rows(parameters["block_n"], plan.block_m, device)
    has_one_group = weight.group >= num_tiles * TILE_COLUMNS
    groups = 0 if has_one_group else max(1, TILE_COLUMNS // weight.group)
    num_programs = -(-out_size // block_n) * plan.bound
    splits = min(parameters.get("splits", 1), num_tiles) if num_programs <= MAX_TILES else 1
    partial = counts = None
    if splits > 1:
        partial = torch.empty(splits, plan.num_pairs, out_size, dtype=torch.float32, device=device)
        counts = counters(device)
    _grouped_packed_kernel[(-(-out_size // block_n), plan.bound, splits)](
        x, weight.values, weight.scales, weight.zeros, bias, row_weights, plan.pairs, plan.experts, plan.num_blocks,
        out, partial, counts, plan.num_pairs, out_size, in_size, num_tiles, x.stride(0), out.stride(0),
        weight.values.stride(0), weight.scales.stride(0), weight.scales.stride(1),
        X_PAIRS=x_pairs, OUT_PAIRS=out_pairs, KIND=weight.kind, WORDS=words, GROUPS=groups,
        GROUP_BLOCKS=1 if has_one_group else max(1, weight.group // TILE_COLUMNS), HAS_EXPONENTS=weight.has_exponents,
        HAS_ZEROS=weight.zeros is not None, HAS_BIAS=bias is not None, HAS_ROW_WEIGHTS=row_weights is not None,
        ACTIVATION=activation, IS_EVEN=in_size % TILE_COLUMNS == 0, HAS_ASSEMBLY=not IS_INTERPRETING,
        IS_DEPENDENT=can_overlap(device), SPLITS=splits, BLOCK_M=plan.block_m, BLOCK_N=block_n,
        num_warps=parameters["num_warps"], num_stages=parameters["num_stages"],
        **dependent_options(device, plan.num_pairs // max(x_pairs, out_pairs)),
    )  # fmt: skip


def grouped_gate_up_packed_torch(
    x: Tensor, weight: PackedExperts, plan: ExpertPlan, top_k: int, activation: str = "silu", bias: Tensor | None = None
) -> Tensor:
    """As `grouped_gate_up_torch`, with what the gated weights stand for, exactly; bias [num_experts, rows], the
    gate's first.
    """
    return gate_up_by(_product(weight, bias), x, plan, top_k, weight.size[0] // 2, activation)


def grouped_down_packed_torch(
    x: Tensor, weight: PackedExperts, plan: ExpertPlan, row_weights: Tensor, out: Tensor, bias: Tensor | None = None
) -> Tensor:
    """As `grouped_down_torch`, with what the weights stand for, exactly."""
    return down_by(_product(weight, bias), x, plan, row_weights, out)


def _product(weight: PackedExperts, bias: Tensor | None) -> Product:
    return lambda x, expert: linear_packed_torch(x, weight.of(expert), None if bias is None else bias[expert])
