"""Products with weights of 4 and 8 bits and inputs of 16: `x W^T + b`, plain or gated by SiLU.

Few rows go through one kernel, which reads a quarter or half of the bytes and leaves the rest to `tile_product`; as in
`linear`, the weights are the tall operand and the sum may be cut into splits. Many rows are bound by arithmetic: the
weight is written out in the inputs' type, a piece of it that stays in L2 at a time, for the library's product. Knows
matrices, not the projections of a model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.dequantise_packed import dequantise_packed
from cb_backend.kernels.launch import (
    IS_INTERPRETING,
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    launch_parameters,
    let_next_start,
    needs_twin,
    next_power_of_2,
    num_multiprocessors,
    tl,
)
from cb_backend.kernels.linear_one_row import gated, prefetch
from cb_backend.kernels.packed import KINDS, TILE_COLUMNS, TILE_ROWS, PackedWeight, dequantise_packed_torch
from cb_backend.kernels.packed_tile import load_group, tile_product
from cb_backend.kernels.silu_mul import silu_mul, silu_mul_torch
from cb_backend.kernels.split_sums import MAX_TILES, counters, sum_splits

MAX_ROWS = 512  # above, a product is bound by arithmetic, and the library is nearer to what the tensor cores give
MAX_BLOCK_M = 128
_PIECE_BYTES = 32 << 20  # of a weight written out at once: less than an H100's L2


@jit()
def block_scales(pointer, stride, rows, block, GROUPS: tl.constexpr, GROUP_BLOCKS: tl.constexpr):
    """Scales (or zero points) of a block of 128 columns, four a row: those of `tile_product`'s first halves."""
    if GROUPS == 8:
        return load_group(pointer + block * 8 * stride, 2 * stride, rows, 0, 4)
    elif GROUPS > 1:
        return load_group(pointer, stride, rows, block * GROUPS, GROUPS)
    else:
        return load_group(pointer, stride, rows, block // GROUP_BLOCKS, 1)


@jit()
def _interleaved(acc, dtype: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """silu(gate) * up [BLOCK_M, BLOCK_N / 2] of sums [BLOCK_N, BLOCK_M] whose rows are gate and up in turn."""
    gate, up = tl.split(tl.reshape(tl.trans(acc), [BLOCK_M, BLOCK_N // 2, 2]))
    return gated(gate, up, dtype)


@jit("num_rows")
def _linear_packed_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    out_size,
    in_size,
    num_blocks,
    split_blocks,
    x_stride,
    scale_stride,
    global_scale,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,  # 16-bit words of a row's 128 elements
    GROUPS: tl.constexpr,  # of 128 columns; 0: one for all of in_size
    GROUP_BLOCKS: tl.constexpr,  # blocks of 128 columns in a group, where it has more than one
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,  # rows of the weight are gate and up in turn
    IS_EVEN: tl.constexpr,  # in_size is a multiple of 128
    SPLITS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    PREFETCH: tl.constexpr,  # bytes of each 64 rows brought to L2 while waiting
    HAS_ASSEMBLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_N rows of the weight with BLOCK_M rows of x, summed over one split of the input size, a program."""
    tile, split, m_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, c = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, WORDS)
    m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    start = split * split_blocks
    end = tl.minimum(start + split_blocks, num_blocks)
    # Rows past the last are the last again: their sums are not stored, and no load needs a mask for them.
    n_there = tl.minimum(n, out_size - 1)
    tile_words = num_blocks.to(tl.int64) * (64 * WORDS)
    values_row_ptr = values_ptr + (n_there // 64) * tile_words + (n_there % 64) * WORDS
    let_next_start(IS_DEPENDENT)
    if IS_DEPENDENT:
        piece = tl.minimum(tile * BLOCK_N // 64 + tl.arange(0, (BLOCK_N + 63) // 64), (out_size - 1) // 64)
        num_bytes = tl.minimum(PREFETCH, (end - start) * (128 * WORDS))
        prefetch(values_ptr + piece * tile_words + start * (64 * WORDS), num_bytes, (BLOCK_N + 63) // 64, PREFETCH > 0)
    if GROUPS > 0:  # of the first block; weights may be read before waiting
        scales = block_scales(scales_ptr, scale_stride, n_there, start, GROUPS, GROUP_BLOCKS)
        second = scales
        if GROUPS == 8:
            second = block_scales(scales_ptr + scale_stride, scale_stride, n_there, start, GROUPS, GROUP_BLOCKS)
    else:
        whole = tl.load(scales_ptr + n_there)
        scales = (whole, whole, whole, whole)
        second = scales
    zeros = scales
    if HAS_ZEROS and GROUPS > 0:
        zeros = block_scales(zeros_ptr, scale_stride, n_there, start, GROUPS, GROUP_BLOCKS)
    elif HAS_ZEROS:
        whole_zeros = tl.load(zeros_ptr + n_there)
        zeros = (whole_zeros, whole_zeros, whole_zeros, whole_zeros)
    await_previous(IS_DEPENDENT)
    is_row = (m < num_rows)[:, None]
    x_row_ptr = x_ptr + m[:, None] * x_stride
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(start, end):
        words = tl.load(values_row_ptr[:, None] + block * (64 * WORDS) + c[None, :], eviction_policy="evict_first")
        # The next block's scales are asked for now: loads this narrow are not pipelined by the compiler.
        following = tl.minimum(block + 1, end - 1)
        next_scales, next_second, next_zeros = scales, second, zeros
        if GROUPS > 0:
            next_scales = block_scales(scales_ptr, scale_stride, n_there, following, GROUPS, GROUP_BLOCKS)
            if GROUPS == 8:
                next_second = block_scales(
                    scales_ptr + scale_stride, scale_stride, n_there, following, GROUPS, GROUP_BLOCKS
                )
            if HAS_ZEROS:
                next_zeros = block_scales(zeros_ptr, scale_stride, n_there, following, GROUPS, GROUP_BLOCKS)
        acc = tile_product(
            acc, x_row_ptr + block * 128, is_row, in_size - block * 128, words, scales, zeros, second,
            KIND, WORDS, GROUPS, KIND != "fp4" and GROUPS > 0, 128 // WORDS // max(GROUPS, 1), HAS_ZEROS, IS_EVEN,
            HAS_ASSEMBLY,
        )  # fmt: skip
        scales, second, zeros = next_scales, next_second, next_zeros
    if GROUPS == 0:
        factor = scales[0].to(tl.float32) * (1.1754943508222875e-38 if KIND == "fp4" else 1.0)
        acc *= factor[:, None]
    acc *= global_scale
    is_stored = (n < out_size)[:, None] & (m < num_rows)[None, :]
    if SPLITS > 1:
        offset = n[:, None] + m[None, :] * out_size  # partial [SPLITS, num_rows, out_size]
        stride = num_rows * out_size
        tl.store(partial_ptr + split * stride + offset, acc, mask=is_stored)
        # The barrier and the atomic make this program's sums visible before the count that announces them.
        tl.debug_barrier()
        counter_ptr += m_block * tl.num_programs(0) + tile
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(counter_ptr, 0)  # as the next launch wants it
        acc = sum_splits(partial_ptr, offset, is_stored, stride, SPLITS)
    if IS_GATED:
        half = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        is_half_stored = (m < num_rows)[:, None] & (half < out_size // 2)[None, :]
        product = _interleaved(acc, out_ptr.dtype.element_ty, BLOCK_M, BLOCK_N)
        half_ptr = out_ptr + m[:, None] * (out_size // 2) + half[None, :]
        tl.store(half_ptr, product.to(out_ptr.dtype.element_ty), mask=is_half_stored)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=n < out_size, other=0.0).to(tl.float32)[:, None]
        out_tile_ptr = out_ptr + n[:, None] + m[None, :] * out_size
        tl.store(out_tile_ptr, acc.to(out_ptr.dtype.element_ty), mask=is_stored)


def linear_packed(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`linear_packed_torch` by the kernel, or by the library on the weight written out piece by piece.

    A gated weight's product has its gate's columns first. Rows of x may be strided.
    """
    if needs_twin(x):
        return linear_packed_torch(x, weight, bias, out)
    parameters = None if weight.is_gated else _parameters("linear_packed", x, weight)
    if parameters is None:
        return _library_product(x, weight, bias, out)
    if out is None:
        out = x.new_empty(x.shape[0], weight.size[0])
    _launch(x, weight, bias, out, parameters)
    return out


def linear_silu_mul_packed(x: Tensor, weight: PackedWeight) -> Tensor:
    """`linear_silu_mul_packed_torch` in one launch, or by way of the library. Raises `ValueError` if not gated."""
    if not weight.is_gated:
        raise ValueError("the weight is not a gated one: its rows are not gate and up in turn")
    if needs_twin(x):
        return linear_silu_mul_packed_torch(x, weight)
    parameters = _parameters("linear_silu_mul_packed", x, weight)
    if parameters is None:
        return silu_mul(_library_product(x, weight, None, None))
    out = x.new_empty(x.shape[0], weight.size[0] // 2)
    _launch(x, weight, None, out, parameters)
    return out


def _parameters(op: str, x: Tensor, weight: PackedWeight) -> dict[str, int] | None:
    """Launch parameters of the table's entry; None where the library is to make the product."""
    num_rows = x.shape[0]
    is_plain = x.element_size() == 2 or IS_INTERPRETING  # float32 is not for the tensor cores
    if num_rows == 0 or num_rows > MAX_ROWS or x.stride(1) != 1 or not is_plain:
        return None
    n, k = weight.size
    bits = KINDS[weight.kind].bits
    parameters = launch_parameters(op, x.device, n=n, k=k, m=next_power_of_2(num_rows), bits=bits)
    return None if "library" in parameters else parameters


def _launch(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, parameters: dict[str, int]) -> None:
    num_rows, (out_size, in_size) = x.shape[0], weight.size
    num_blocks, words = weight.values.shape[1], weight.values.shape[3]
    block_m = min(MAX_BLOCK_M, max(16, next_power_of_2(num_rows)))
    block_n = tile_rows(parameters["block_n"], block_m, x.device)
    num_tiles = -(-out_size // block_n)
    m_blocks = -(-num_rows // block_m)
    split_blocks = -(
        -num_blocks // (parameters.get("splits") or splits_for(num_tiles * m_blocks, num_blocks, num_rows, x.device))
    )
    splits = -(-num_blocks // split_blocks)  # none of them empty
    partial = counts = None
    if splits > 1:
        assert num_tiles * m_blocks <= MAX_TILES, f"{num_tiles * m_blocks} tiles: too many to split"
        partial = torch.empty(splits, num_rows, out_size, dtype=torch.float32, device=x.device)
        counts = counters(x.device)
    has_one_group = weight.group >= num_blocks * TILE_COLUMNS
    groups = 0 if has_one_group else max(1, TILE_COLUMNS // weight.group)
    _linear_packed_kernel[(num_tiles, splits, m_blocks)](
        x, weight.values, weight.scales, weight.zeros, bias, out, partial, counts,
        num_rows, out_size, in_size, num_blocks, split_blocks, x.stride(0), weight.scales.shape[1], weight.global_scale,
        KIND=weight.kind, WORDS=words, GROUPS=groups,
        GROUP_BLOCKS=1 if has_one_group else max(1, weight.group // TILE_COLUMNS),
        HAS_ZEROS=weight.zeros is not None, HAS_BIAS=bias is not None, IS_GATED=weight.is_gated,
        IS_EVEN=in_size % TILE_COLUMNS == 0, SPLITS=splits, IS_DEPENDENT=can_overlap(x.device),
        PREFETCH=parameters.get("prefetch", 0), HAS_ASSEMBLY=not IS_INTERPRETING,
        BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=parameters["num_warps"], num_stages=parameters["num_stages"], **dependent_options(x.device),
    )  # fmt: skip


def tile_rows(block_n: int, block_m: int, device: torch.device) -> int:
    """Rows of the weight that a program takes.

    NOTE: for Blackwell, Triton 3.6 compiles tiles of 128 x 128 whose first operand comes from registers to an empty
    kernel (found by compiling for sm_100); half of that is right.
    """
    is_blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10
    return min(block_n, 64) if is_blackwell and block_m >= 128 else block_n


def splits_for(num_tiles: int, num_blocks: int, num_rows: int, device: torch.device) -> int:
    """Splits of a sum for shapes that nobody has tuned: of few rows, three programs for every multiprocessor.

    Not so many that the partial sums come near to the bytes of the weights, or that a program has a single block.
    """
    programs = (3 if num_rows <= 32 else 1) * num_multiprocessors(device)
    wanted = round(programs / num_tiles)
    return max(1, min(wanted, num_blocks // 2, num_blocks * TILE_COLUMNS // (16 * max(16, num_rows)), 16))


def _library_product(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """By pieces of the weight in x's type; the scratch is one piece."""
    out_size, in_size = weight.size
    if out is None:
        out = x.new_empty(x.shape[0], out_size)
    rows_at_once = max(TILE_ROWS, _PIECE_BYTES // (x.element_size() * in_size) // TILE_ROWS * TILE_ROWS)
    scratch = x.new_empty(min(rows_at_once, out_size), in_size)
    for start in range(0, out_size, rows_at_once):
        num_rows = min(rows_at_once, out_size - start)
        piece = dequantise_packed(weight, start, scratch[:num_rows])
        # Of a gated weight's piece, the gate's rows and the up projection's are columns in two places.
        halves = 2 if weight.is_gated else 1
        size = num_rows // halves
        for half in range(halves):
            first = start // halves + half * (out_size // 2)
            columns, part = out[:, first : first + size], piece[half * size : (half + 1) * size].t()
            if bias is None:
                torch.mm(x, part, out=columns)
            else:
                torch.addmm(bias[first : first + size], x, part, out=columns)
    return out


def linear_packed_torch(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x W^T + b. x [num_rows, in_size]; W what the weight stands for, exactly; bias [out_size].

    The sums are fp32 and rounded once. Returns [num_rows, out_size] of x's dtype, in `out` where given.
    """
    product = x.float() @ dequantise_packed_torch(weight).t()
    if bias is not None:
        product += bias.float()
    return product.to(x.dtype) if out is None else out.copy_(product)


def linear_silu_mul_packed_torch(x: Tensor, weight: PackedWeight) -> Tensor:
    """silu(x G^T) * (x U^T); returns [num_rows, out_size / 2], rounded as in separate steps."""
    return silu_mul_torch(linear_packed_torch(x, weight))
