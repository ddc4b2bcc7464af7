"""Products of a single row with weights, plain or gated, or with the residual addition and RMSNorm before them.

One request that decodes alone is bound by reading weights and by the gaps between kernels. So a program asks for its
first weights before it waits for the kernel before it, and there are no tensor cores to feed. The norm needs no pass of
its own over the row: its scale is one number, so it multiplies the finished sums, and the squares are summed beside
them. Called by `linear`'s and `add_norm_linear`'s launchers; knows no tuned table.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cb_backend.kernels.launch import await_previous, can_overlap, dependent_options, jit, let_next_start, tl
from cb_backend.kernels.silu_mul import gated


@jit()
def prefetch(pointers, num_bytes, COUNT: tl.constexpr, IS_PREFETCHING: tl.constexpr):
    """Ask for `num_bytes` (a multiple of 16) at each of COUNT pointers to come into L2; waits for nothing.

    COUNT: at most a program's threads, of which the first that holds a pointer asks. The others hold the same pointers
    again and would ask as well: of 4 pointers and 256 threads 64 times.
    """
    if IS_PREFETCHING:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 thread; mov.u32 thread, %tid.x; setp.lt.u32 p, thread, $3; "
            "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }", "=r,l,r,r",
            [pointers.to(tl.uint64), num_bytes, COUNT], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


class AddNorm(NamedTuple):
    """What comes before a product: `out_residual` = x + residual, of whose RMSNorm the product is."""

    residual: Tensor  # [1, in_size]
    weight: Tensor  # [in_size]
    eps: float
    out_residual: Tensor  # [1, in_size]; no input's memory: programs that have not begun will still read those


@jit()
def _one_row_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    out_residual_ptr,
    out_size,
    in_size,
    eps: tl.constexpr,
    HAS_NORM: tl.constexpr,  # the row is the norm of x + residual, which is stored to out_residual; not where gated
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,  # two weights, out_size rows each: gate, then up
    IS_EVEN: tl.constexpr,  # in_size is a multiple of BLOCK_K
    IS_DEPENDENT: tl.constexpr,
    IS_SHARED: tl.constexpr,  # the next kernel reads x without waiting: it may start once x is complete
    PREFETCH: tl.constexpr,  # elements of each weight row, after the first tile, brought to L2 while waiting
    FOLD: tl.constexpr,  # neighbours whose products are added at once; above 1 the next tile of x is loaded ahead too
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N output columns a program. The next tile of weights is on its way while one is multiplied.

    A sum for each element of a tile takes half the registers. With FOLD one serves FOLD elements, so more programs
    share a multiprocessor; whether that is faster is the table's to say.
    """
    let_next_start(IS_DEPENDENT and not IS_SHARED)
    program = tl.program_id(0)
    n, k = program * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    weight_row_ptr = weight_ptr + tl.minimum(n, out_size - 1).to(tl.int64) * in_size  # [BLOCK_N]
    up_shift = tl.cast(out_size, tl.int64) * in_size
    weight_tile_ptr = weight_row_ptr[:, None] + k[None, :]
    weight = _tile(weight_tile_ptr, k, in_size, IS_EVEN)
    up = weight
    if IS_GATED:
        up = _tile(weight_tile_ptr + up_shift, k, in_size, IS_EVEN)
    if HAS_NORM:
        norm_weight = tl.load(norm_weight_ptr + k, mask=k < in_size, other=0.0)  # [BLOCK_K]
        squares = tl.zeros([BLOCK_K // FOLD], tl.float32)
        own = program * BLOCK_K  # the next columns of out_residual to store: programs have all of them and take turns
    if IS_DEPENDENT:
        prefetch(weight_row_ptr + BLOCK_K, PREFETCH * 2, BLOCK_N, PREFETCH > 0)
        prefetch(weight_row_ptr + up_shift + BLOCK_K, PREFETCH * 2, BLOCK_N, IS_GATED and PREFETCH > 0)
    await_previous(IS_DEPENDENT)
    let_next_start(IS_DEPENDENT and IS_SHARED)
    acc = tl.zeros([BLOCK_N, BLOCK_K // FOLD], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K // FOLD], tl.float32)
    if FOLD > 1 and not HAS_NORM:
        x = tl.load(x_ptr + k, mask=k < in_size, other=0.0)
    for offset in range(0, in_size, BLOCK_K):
        column = offset + k
        # After the last tile all of the next one's loads are masked.
        next_weight = tl.load(
            weight_tile_ptr + offset + BLOCK_K, mask=(column + BLOCK_K < in_size)[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        next_up = next_weight
        if IS_GATED:
            next_up = tl.load(
                weight_tile_ptr + up_shift + offset + BLOCK_K, mask=(column + BLOCK_K < in_size)[None, :], other=0.0,
                eviction_policy="evict_first",
            )  # fmt: skip
        if HAS_NORM:
            # Not ahead: three tiles more in registers would leave room for fewer programs.
            x = tl.load(x_ptr + column, mask=column < in_size, other=0.0)
            residual = tl.load(residual_ptr + column, mask=column < in_size, other=0.0)
            total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            tl.store(out_residual_ptr + column, total, mask=(column < in_size) & (offset == own))
            own += tl.where(offset == own, tl.num_programs(0) * BLOCK_K, 0)
            row = total.to(tl.float32)
            squares += tl.sum(tl.reshape(row * row, [BLOCK_K // FOLD, FOLD]), axis=1)
            row *= norm_weight.to(tl.float32)
            norm_weight = tl.load(norm_weight_ptr + column + BLOCK_K, mask=column + BLOCK_K < in_size, other=0.0)
        elif FOLD > 1:
            row = x.to(tl.float32)
            x = tl.load(x_ptr + column + BLOCK_K, mask=column + BLOCK_K < in_size, other=0.0)
        else:
            row = tl.load(x_ptr + column, mask=column < in_size, other=0.0).to(tl.float32)
        acc += _folded(weight.to(tl.float32) * row[None, :], FOLD)
        weight = next_weight
        if IS_GATED:
            acc_up += _folded(up.to(tl.float32) * row[None, :], FOLD)
            up = next_up
    if IS_GATED and FOLD > 1:  # in one exchange between warps
        product, product_up = tl.reduce((acc, acc_up), axis=1, combine_fn=_add_both)  # [BLOCK_N] each
    else:
        product, product_up = tl.sum(acc, axis=1), tl.sum(acc_up, axis=1)
    if HAS_NORM:
        product *= tl.rsqrt(tl.sum(squares, axis=0) / in_size + eps)
    if HAS_BIAS:
        product += tl.load(bias_ptr + n, mask=n < out_size, other=0.0).to(tl.float32)
    if IS_GATED:
        product = gated(product, product_up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + n, product.to(out_ptr.dtype.element_ty), mask=n < out_size)


@jit()
def _folded(values, FOLD: tl.constexpr):
    """Sums of FOLD neighbours of each row, which a thread holds: [rows, columns] -> [rows, columns / FOLD]."""
    if FOLD > 1:
        return tl.sum(tl.reshape(values, [values.shape[0], values.shape[1] // FOLD, FOLD]), axis=2)
    else:
        return values


@jit()
def _add_both(first, first_up, second, second_up):
    return first + second, first_up + second_up


@jit()
def _tile(pointers, k, in_size, IS_EVEN: tl.constexpr):
    """The first tile of weights [BLOCK_N, BLOCK_K]."""
    if IS_EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    else:
        return tl.load(pointers, mask=(k < in_size)[None, :], other=0.0, eviction_policy="evict_first")


def launch_one_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    parameters: dict[str, int],
    *,
    is_gated: bool,
    is_shared: bool = False,
    norm: AddNorm | None = None,
) -> None:
    """Write the product of x [1, in_size], or of what the norm makes of it, to `out` [1, out_size]."""
    in_size, out_size = x.shape[1], out.shape[1]
    block_n, block_k = parameters["block_n"], parameters["block_k"]
    # Prefetches are of whole 16 bytes, which rows of an odd size do not begin at.
    prefetched = min(parameters.get("prefetch", 0), max(in_size - block_k, 0)) if in_size % 8 == 0 else 0
    residual, norm_weight, eps, out_residual = norm or (None, None, None, None)
    _one_row_kernel[(-(-out_size // block_n),)](
        x, residual, norm_weight, weight, bias, out, out_residual, out_size, in_size,
        eps=eps, HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None, IS_GATED=is_gated, IS_EVEN=in_size % block_k == 0,
        IS_DEPENDENT=can_overlap(x.device), IS_SHARED=is_shared, PREFETCH=prefetched, FOLD=parameters.get("fold", 1),
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=parameters["num_warps"], **dependent_options(x.device),
    )  # fmt: skip
