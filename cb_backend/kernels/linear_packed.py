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
    can_overlap,
    dependent_options,
    launch_parameters,
    needs_twin,
    next_power_of_2,
    num_multiprocessors,
)
from cb_backend.kernels.linear_packed_kernel import _linear_packed_kernel
from cb_backend.kernels.packed import KINDS, TILE_COLUMNS, TILE_ROWS, PackedWeight, dequantise_packed_torch
from cb_backend.kernels.packed_few_rows import _packed_few_rows_kernel
from cb_backend.kernels.packed_groups import group_sums
from cb_backend.kernels.packed_warp import HALVES, product_text
from cb_backend.kernels.silu_mul import silu_mul, silu_mul_torch
from cb_backend.kernels.split_sums import MAX_TILES, counters

MAX_ROWS = 512  # above, a product is bound by arithmetic, and the library is nearer to what the tensor cores give
MAX_ROWS_OF_GROUPS = 64  # the same of weights whose every 32 bytes are a sum of their own
MAX_BLOCK_M = 128
MAX_DIRECT_ROWS = 32
_PIECE_BYTES = 32 << 20  # of a weight written out at once: less than an H100's L2


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
    # NOTE: an 8B's step of 256 rows on an H200 took 20.7 ms with bytes in groups of 32, 31.3 with shifts, bf16 12.1.
    has_many_sums = weight.shifts is not None or (weight.kind == "int8" and weight.group == 32)
    if has_many_sums and num_rows > MAX_ROWS_OF_GROUPS and not IS_INTERPRETING:
        return None
    if num_rows == 0 or num_rows > MAX_ROWS or x.stride(1) != 1 or not is_plain:
        return None
    n, k = weight.size
    number = KINDS[weight.kind]
    parameters = launch_parameters(
        op, x.device, n=n, k=k, m=next_power_of_2(num_rows), bits=number.bits, is_float=int(number.offset is None),
        is_direct=int(_can_be_direct(x, weight)),
    )  # fmt: skip
    return None if "library" in parameters else parameters


def _can_be_direct(x: Tensor, weight: PackedWeight) -> bool:
    """Whether the kernel that reads weights straight into registers takes these: few rows of bf16, and no shifts."""
    is_known = weight.shifts is None and (weight.zeros is None or weight.kind == "int4")
    is_whole = x.stride(0) % 8 == 0 and weight.size[1] % TILE_COLUMNS == 0
    is_aligned = is_whole and x.data_ptr() % 16 == 0 and weight.values.data_ptr() % 16 == 0
    is_bf16 = x.dtype == torch.bfloat16 and weight.scales.dtype in (torch.bfloat16, torch.float32)
    return is_known and is_aligned and is_bf16 and x.shape[0] <= MAX_DIRECT_ROWS


def _launch(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, parameters: dict[str, int]) -> None:
    num_rows, (out_size, in_size) = x.shape[0], weight.size
    num_blocks, words = weight.values.shape[1], weight.values.shape[3]
    if "pairs" in parameters:
        _launch_few_rows(x, weight, bias, out, parameters)
        return
    block_m = min(parameters.get("block_m", MAX_BLOCK_M), max(16, next_power_of_2(num_rows)))
    block_n = tile_rows(parameters["block_n"], block_m, x.device)
    num_tiles = -(-out_size // block_n)
    m_blocks = -(-num_rows // block_m)
    split_blocks = -(
        -num_blocks // (parameters.get("splits") or splits_for(num_tiles * m_blocks, num_blocks, num_rows, x.device))
    )
    splits = -(-num_blocks // split_blocks)  # none of them empty
    sums = None if weight.shifts is None else group_sums(x)
    partial = counts = None
    if splits > 1:
        assert num_tiles * m_blocks <= MAX_TILES, f"{num_tiles * m_blocks} tiles: too many to split"
        partial = torch.empty(splits, num_rows, out_size, dtype=torch.float32, device=x.device)
        counts = counters(x.device)
    has_one_group = weight.group >= num_blocks * TILE_COLUMNS
    groups = 0 if has_one_group else max(1, TILE_COLUMNS // weight.group)
    is_scaled_first = bool(parameters.get("scale_first")) and weight.scales.dtype == x.dtype
    _linear_packed_kernel[(num_tiles, splits, m_blocks)](
        x, weight.values, weight.scales, weight.zeros, weight.shifts, sums, bias, out, partial, counts,
        num_rows, out_size, in_size, num_blocks, split_blocks, x.stride(0), weight.scales.shape[1], weight.global_scale,
        KIND=weight.kind, WORDS=words, GROUPS=groups,
        GROUP_BLOCKS=1 if has_one_group else max(1, weight.group // TILE_COLUMNS),
        IS_SCALED_AFTER=groups > 0 and weight.kind != "fp4" and not is_scaled_first,
        JOIN=parameters.get("join", 4), HAS_ZEROS=weight.zeros is not None, HAS_SHIFTS=weight.shifts is not None,
        HAS_BIAS=bias is not None, IS_GATED=weight.is_gated, IS_EVEN=in_size % TILE_COLUMNS == 0, SPLITS=splits,
        IS_DEPENDENT=can_overlap(x.device), PREFETCH=parameters.get("prefetch", 0), HAS_ASSEMBLY=not IS_INTERPRETING,
        BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=parameters["num_warps"], num_stages=parameters["num_stages"],
        **{name: parameters[name] for name in ("maxnreg",) if name in parameters}, **dependent_options(x.device),
    )  # fmt: skip


def _launch_few_rows(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, parameters: dict[str, int]
) -> None:
    num_rows, out_size = x.shape[0], weight.size[0]
    num_blocks = weight.values.shape[1]
    pairs, warps = parameters["pairs"], parameters["num_warps"]
    tiles = max(1, next_power_of_2(num_rows) // 8)
    group = min(weight.group, num_blocks * TILE_COLUMNS)
    has_zeros = weight.zeros is not None
    text, constraints = product_text(
        weight.kind, tiles, pairs, min(group, TILE_COLUMNS), has_zeros, weight.scales.element_size() == 4
    )
    _packed_few_rows_kernel[(-(-out_size // (16 * pairs)),)](
        x, weight.values, weight.scales, weight.zeros, bias, out, num_rows, out_size, num_blocks, x.stride(0),
        weight.scales.shape[1], weight.global_scale, TEXT=text, CONSTRAINTS=constraints, HALVES=HALVES[weight.kind],
        GROUP=group, HAS_ZEROS=has_zeros, HAS_BIAS=bias is not None, IS_GATED=weight.is_gated,
        IS_DEPENDENT=can_overlap(x.device), TILES=tiles, PAIRS=pairs, WARPS=warps,
        DEPTH=parameters.get("depth", 1), num_warps=warps,
        **{name: parameters[name] for name in ("maxnreg",) if name in parameters}, **dependent_options(x.device),
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
