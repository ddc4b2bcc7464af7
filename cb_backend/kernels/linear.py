"""Products with weights for the few rows of a decode step: `x W^T + b`, plain or gated by SiLU.

With few rows a product is one read of the weights, so the kernels are built to keep many bytes in flight on every
multiprocessor: the weights are the tall operand of the tensor cores, and the sum over the input size is cut into a
fixed number of splits where the output alone has too few tiles. The last program of a tile adds the splits in their
order, so there is no second launch and results do not vary. A single row has kernels of its own (`linear_one_row`).
Which kernel serves a shape, or that the library's product is faster, stands in `tuned/<gpu>.json`. Knows no models.
"""

from __future__ import annotations

import torch
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
    next_power_of_2,
    tl,
)
from cb_backend.kernels.linear_one_row import launch_one_row, prefetch
from cb_backend.kernels.silu_mul import gated, silu_mul, silu_mul_torch
from cb_backend.kernels.split_sums import MAX_TILES, counters, sum_splits

MAX_ROWS = 256  # above, a product is bound by arithmetic, and a library's is near what the tensor cores give
_LIBRARY = {"library": 1}


@jit("num_rows")
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    x_scales_ptr,
    weight_scales_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    out_size,
    in_size,
    split_size,
    x_stride,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,  # x and weight are fp8: one for each row of either
    IS_GATED: tl.constexpr,  # two weights, out_size rows each: gate, then up
    IS_EVEN: tl.constexpr,  # in_size is a multiple of BLOCK_K
    SPLITS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    IS_SHARED: tl.constexpr,  # the next kernel reads x without waiting: it may start once x is complete
    PREFETCH: tl.constexpr,  # elements of each weight row brought to L2 while waiting
    BLOCK_M: tl.constexpr,  # >= num_rows
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N output columns of all rows, summed over one split of the input size, a program."""
    tile, split = tl.program_id(0), tl.program_id(1)
    n, m, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    start = split * split_size
    end = tl.minimum(start + split_size, in_size)
    # Columns past the last are the last again: their sums are not stored, and no load needs a mask for them.
    weight_row_ptr = weight_ptr + tl.minimum(n, out_size - 1).to(tl.int64) * in_size  # [BLOCK_N]
    up_shift = tl.cast(out_size, tl.int64) * in_size
    let_next_start(IS_DEPENDENT and not IS_SHARED)
    if IS_DEPENDENT:
        num_bytes = tl.minimum(PREFETCH, end - start) * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        prefetch(weight_row_ptr + start, num_bytes, BLOCK_N, PREFETCH > 0)
        prefetch(weight_row_ptr + start + up_shift, num_bytes, BLOCK_N, IS_GATED and PREFETCH > 0)
    await_previous(IS_DEPENDENT)
    let_next_start(IS_DEPENDENT and IS_SHARED)
    weight_tile_ptr = weight_row_ptr[:, None] + k[None, :]
    # NOTE: rows of padding are not read. As copies of a real row they would be read by every multiprocessor at once,
    # from one place in L2: products of 88 rows took half as long again as those of 128.
    is_row = (m < num_rows)[:, None]
    x_tile_ptr = x_ptr + m[:, None] * x_stride + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for offset in range(start, end, BLOCK_K):
        if IS_EVEN:
            weight = tl.load(weight_tile_ptr + offset, eviction_policy="evict_first")  # [BLOCK_N, BLOCK_K]
            x = tl.load(x_tile_ptr + offset, mask=is_row, other=0.0)  # [BLOCK_M, BLOCK_K]
        else:
            is_inside = (offset + k < end)[None, :]
            weight = tl.load(weight_tile_ptr + offset, mask=is_inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_tile_ptr + offset, mask=is_row & is_inside, other=0.0)
        if IS_GATED:
            if IS_EVEN:
                up = tl.load(weight_tile_ptr + up_shift + offset, eviction_policy="evict_first")
            else:
                up = tl.load(
                    weight_tile_ptr + up_shift + offset, mask=is_inside, other=0.0, eviction_policy="evict_first"
                )
            acc_up = tl.dot(up, tl.trans(x), acc_up, input_precision="ieee")
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    is_stored = (n < out_size)[:, None] & (m < num_rows)[None, :]
    if SPLITS > 1:
        # partial [SPLITS, num_rows, out_size], twice that long where gated
        width = out_size * 2 if IS_GATED else out_size
        offset = n[:, None] + m[None, :] * width
        stride = num_rows * width
        tl.store(partial_ptr + split * stride + offset, acc, mask=is_stored)
        if IS_GATED:
            tl.store(partial_ptr + split * stride + offset + out_size, acc_up, mask=is_stored)
        # The barrier and the atomic make this program's sums visible before the count that announces them.
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(counter_ptr + tile, 0)  # as the next launch wants it
        acc = sum_splits(partial_ptr, offset, is_stored, stride, SPLITS)
        if IS_GATED:
            acc_up = sum_splits(partial_ptr + out_size, offset, is_stored, stride, SPLITS)
    if HAS_SCALES:
        x_scales = tl.load(x_scales_ptr + m, mask=m < num_rows, other=0.0)[None, :]
        acc *= tl.load(weight_scales_ptr + n, mask=n < out_size, other=0.0)[:, None] * x_scales
        if IS_GATED:
            acc_up *= tl.load(weight_scales_ptr + out_size + n, mask=n < out_size, other=0.0)[:, None] * x_scales
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < out_size, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        acc = gated(acc, acc_up, out_ptr.dtype.element_ty)
    out_tile_ptr = out_ptr + n[:, None] + m[None, :] * out_size
    tl.store(out_tile_ptr, acc.to(out_ptr.dtype.element_ty), mask=is_stored)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`linear_torch`, by whatever the tuned table says is fastest for this shape; rows of x may be strided."""
    parameters = product_parameters("linear", x, weight, weight.shape[0])
    if "library" in parameters:
        return _library_product(x, weight, bias, out, parameters)
    return launched_linear(x, weight, bias, out, parameters)


def launched_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    parameters: dict[str, int],
    *,
    is_shared: bool = False,
) -> Tensor:
    """`linear` by the kernel that `parameters` describe. is_shared: it lets the next one start once x is complete."""
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, weight, bias, out, parameters, is_gated=False, is_shared=is_shared)
    return out


def linear_silu_mul(x: Tensor, weight: Tensor) -> Tensor:
    """`linear_silu_mul_torch` in one launch, or in two where the tuned table says so."""
    out_size = weight.shape[0] // 2
    parameters = product_parameters("linear_silu_mul", x, weight, out_size)
    if "library" in parameters:
        return silu_mul(_library_product(x, weight, None, None, parameters))
    out = x.new_empty(x.shape[0], out_size)
    _launch(x, weight, None, out, parameters, is_gated=True)
    return out


def product_parameters(op: str, x: Tensor, weight: Tensor, out_size: int) -> dict[str, int]:
    """Launch parameters of the table's entry; those of a library's product where the kernels do not apply."""
    num_rows = x.shape[0]
    if num_rows == 0 or x.element_size() != 2 or needs_twin(x):
        return _LIBRARY
    if x.stride(1) != 1 or not weight.is_contiguous():
        return _LIBRARY
    parameters = launch_parameters(op, x.device, n=out_size, k=weight.shape[1], m=next_power_of_2(num_rows))
    return parameters if num_rows <= MAX_ROWS or "library" in parameters else _LIBRARY


def _library_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, parameters: dict[str, int]
) -> Tensor:
    """`linear_torch` by the library that `parameters` name: 1 is cuBLAS, 2 cuBLASLt, which chooses other kernels."""
    if parameters["library"] != 2:
        return linear_torch(x, weight, bias, out)
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return linear_torch(x, weight, bias, out)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    parameters: dict[str, int],
    *,
    is_gated: bool,
    is_shared: bool = False,
) -> None:
    """One launch of the kernel that `parameters` describe. Raises `ValueError` where `out` is not contiguous."""
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}; the product is written to a contiguous tensor")
    launch = launch_one_row if "vector" in parameters and x.shape[0] == 1 else launch_tiled
    launch(x, weight, bias, out, parameters, is_gated=is_gated, is_shared=is_shared)


def launch_tiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    parameters: dict[str, int],
    *,
    is_gated: bool,
    is_shared: bool = False,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """One launch of the tiled kernel; `scales` of the rows of x and of those of weight where both are fp8."""
    num_rows, in_size = x.shape
    out_size = out.shape[1]
    block_n, block_k = parameters["block_n"], parameters["block_k"]
    num_tiles = -(-out_size // block_n)
    # Prefetches are of whole 16 bytes, which rows of an odd size do not begin at.
    prefetched = parameters.get("prefetch", 0) if in_size % 16 == 0 else 0
    splits = parameters["splits"]
    split_size = -(-in_size // (splits * block_k)) * block_k
    splits = -(-in_size // split_size)  # none of them empty
    partial = counts = None
    if splits > 1:
        assert num_tiles <= MAX_TILES, f"{num_tiles} tiles of {block_n} columns: too many to split"
        partial = torch.empty(splits, num_rows, out_size * (1 + is_gated), dtype=torch.float32, device=x.device)
        counts = counters(x.device)
    x_scales, weight_scales = (None, None) if scales is None else scales
    _linear_kernel[(num_tiles, splits)](
        x, weight, bias, x_scales, weight_scales, out, partial, counts,
        num_rows, out_size, in_size, split_size, x.stride(0),
        HAS_BIAS=bias is not None, HAS_SCALES=scales is not None, IS_GATED=is_gated,
        IS_EVEN=in_size % block_k == 0, SPLITS=splits, IS_DEPENDENT=can_overlap(x.device), IS_SHARED=is_shared,
        PREFETCH=prefetched,
        BLOCK_M=max(16, next_power_of_2(num_rows)), BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=parameters["num_warps"], num_stages=parameters["num_stages"], **dependent_options(x.device),
    )  # fmt: skip


def linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x W^T + b. x [num_rows, in_size], weight [out_size, in_size], bias [out_size], all of one type.

    Returns [num_rows, out_size], in `out` where given.
    """
    if out is not None and bias is None and x.is_cuda:
        return torch.mm(x, weight.t(), out=out)  # the same product, without a copy
    if out is None:
        return functional.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def linear_silu_mul_torch(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x G^T) * (x U^T). x [num_rows, in_size]; weight [2 * out_size, in_size], G above U.

    Returns [num_rows, out_size]; products and activation are rounded to x's type, as in separate steps.
    """
    return silu_mul_torch(functional.linear(x, weight))
