"""What quantised checkpoints write, as stored elements with scales: one reader for each way of packing.

Every reader takes a projection's tensors as the file has them and gives them in one form, `StoredWeight`, from which
`kernels.packed.pack` makes what the device holds. Sources: AutoAWQ's gemm layout; AutoGPTQ's and GPTQModel's; the
compressed-tensors formats `pack-quantized`, `int-quantized`, `float-quantized` and `nvfp4-pack-quantized`; NVIDIA
ModelOpt; the block scales of DeepSeek's and Qwen's fp8; OCP microscaling (MXFP4) as gpt-oss has it. Knows tensors, not
which modules have which format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.packed import StoredWeight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds this column of eight
E8M0_BIAS = 127
FP8_BLOCK = 128


def _nibbles(words: Tensor, bits: int) -> Tensor:
    """int32 words [..., n] as their elements [..., n, 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8)


def _shape(name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != wanted:
        raise ConfigError(f"{name} has shape {list(tensor.shape)}; expected {list(wanted)}")


def read_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> StoredWeight:
    """qweight int32 [in, out / 8]; qzeros int32 [groups, out / 8]; scales [groups, out]. Zero points always."""
    in_size, out_size = qweight.shape[0], qweight.shape[1] * 8
    num_groups = scales.shape[0]
    _shape("scales", scales, (num_groups, out_size))
    _shape("qzeros", qzeros, (num_groups, out_size // 8))
    back = torch.tensor(AWQ_ORDER, device=qweight.device).argsort()  # column j of eight lies in nibble back[j]

    def columns(words: Tensor) -> Tensor:
        return _nibbles(words, 4)[..., back].reshape(words.shape[0], out_size)

    zeros = columns(qzeros)
    values = columns(qweight).t().contiguous()
    return StoredWeight(values, scales.t().contiguous(), zeros.t().contiguous(), "int4", -(-in_size // num_groups))


def read_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, *, bits: int, is_v2: bool, is_symmetric: bool
) -> StoredWeight:
    """qweight int32 [in * bits / 32, out], packed along in; qzeros int32 [groups, out * bits / 32].

    scales: [groups, out].
    is_v2: zero points as they are; else each is stored less one (and 0 as the largest). g_idx int32 [in]: each input
    feature's group, where the checkpoint was quantised in order of activations.
    Of symmetric files the stored zero point itself tells the convention: writers have named it wrongly. Raises
    `ConfigError` for one that fits neither, for bits other than 4 and 8, and for shapes that do not fit.
    """
    if bits not in (4, 8):
        raise ConfigError(f"GPTQ weights of {bits} bits; 4 and 8 are supported")
    per_word = 32 // bits
    in_size, out_size = qweight.shape[0] * per_word, qweight.shape[1]
    num_groups = scales.shape[0]
    _shape("scales", scales, (num_groups, out_size))
    _shape("qzeros", qzeros, (num_groups, out_size // per_word))
    values = _nibbles(qweight.t().contiguous(), bits).reshape(out_size, in_size)
    stored_zeros = _nibbles(qzeros, bits).reshape(num_groups, out_size)
    middle = 2 ** (bits - 1)
    zeros: Tensor | None
    if is_symmetric:
        found = stored_zeros.unique().tolist()
        if found not in ([middle - 1], [middle]):
            raise ConfigError(
                f"'sym' is true but zero points are stored as {found[:4]};"
                f" symmetric files store {middle - 1} or {middle}"
            )
        zeros = None
    else:
        zeros = stored_zeros if is_v2 else (stored_zeros.int() + 1).remainder(2**bits).to(torch.uint8)
        zeros = zeros.t().contiguous()
    group = -(-in_size // num_groups)
    order = None if g_idx is None else _order_of(g_idx, in_size, num_groups, group)
    if order is not None:
        values = values[:, order]
    kind = "int4" if bits == 4 else "int8"
    return StoredWeight(values, scales.t().contiguous(), zeros, kind, group, order=order)


def _order_of(g_idx: Tensor, in_size: int, num_groups: int, group: int) -> Tensor | None:
    """The columns sorted by group, or None where they are. Raises `ConfigError` if groups differ in size."""
    _shape("g_idx", g_idx, (in_size,))
    sorted_groups = torch.arange(in_size, device=g_idx.device) // group
    if torch.equal(g_idx.long(), sorted_groups):
        return None
    order = g_idx.long().argsort(stable=True)
    if not torch.equal(g_idx.long()[order], sorted_groups):
        raise ConfigError(f"g_idx does not name each of {num_groups} groups {group} times")
    return order


def read_pack_quantized(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_shape: Tensor,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    *,
    bits: int,
) -> StoredWeight:
    """compressed-tensors: weight_packed int32 [out, in * bits / 32] of value + 2^(bits - 1).

    weight_scale: [out, groups]. weight_shape: int64 [2].
    weight_zero_point: int32 [out * bits / 32, groups], packed along out with the same offset, or int8 [out, groups].
    """
    out_size, in_size = (int(size) for size in weight_shape.tolist())
    per_word = 32 // bits
    _shape("weight_packed", weight_packed, (out_size, -(-in_size // per_word)))
    num_groups = weight_scale.shape[1]
    _shape("weight_scale", weight_scale, (out_size, num_groups))
    values = _nibbles(weight_packed, bits).reshape(out_size, -1)[:, :in_size].contiguous()
    zeros = None
    if weight_zero_point is not None:
        if weight_zero_point.dtype == torch.int32:
            _shape("weight_zero_point", weight_zero_point, (-(-out_size // per_word), num_groups))
            packed = _nibbles(weight_zero_point.t().contiguous(), bits).reshape(num_groups, -1)
            zeros = packed[:, :out_size].t().contiguous()
        else:
            _shape("weight_zero_point", weight_zero_point, (out_size, num_groups))
            zeros = (weight_zero_point.int() + 2 ** (bits - 1)).to(torch.uint8)
    group = -(-in_size // num_groups)
    order = None if weight_g_idx is None else _order_of(weight_g_idx, in_size, num_groups, group)
    if order is not None:
        values = values[:, order]
    return StoredWeight(values, weight_scale, zeros, "int4" if bits == 4 else "int8", group, order=order)


def read_int_quantized(weight: Tensor, weight_scale: Tensor) -> StoredWeight:
    """weight int8 [out, in], weight_scale [out, 1] or one number: symmetric, served with inputs of 16 bits."""
    values = (weight.int() + 128).to(torch.uint8)
    scales = weight_scale.reshape(-1, 1).expand(weight.shape[0], 1).contiguous()
    return StoredWeight(values, scales, None, "int8", weight.shape[1])


def read_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> StoredWeight:
    """weight e4m3 [out, in]; scale float32, bf16 or e8m0: what the weight is multiplied by, whatever its name says.

    One a block of `block` elements [out / block, in / block], which become one a row and 128 columns. Raises
    `ConfigError` for NaN elements and for blocks that are not of 128 columns.
    """
    out_size, in_size = weight.shape
    if bool(weight.float().isnan().any()):
        raise ConfigError("weight holds numbers that are not finite")
    if block[1] != FP8_BLOCK:
        raise ConfigError(f"weight_block_size is {list(block)}; blocks of 128 columns are supported")
    _shape("weight_scale_inv", scale, (-(-out_size // block[0]), -(-in_size // block[1])))
    scales = scale.float().repeat_interleave(block[0], dim=0)[:out_size].contiguous()
    return StoredWeight(weight.view(torch.uint8), scales, None, "fp8", FP8_BLOCK)


def _fp4_elements(packed: Tensor) -> Tensor:
    """uint8 [..., n] of two elements each, the low nibble first, as [..., 2 n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).reshape(*packed.shape[:-1], -1)


def read_nvfp4(weight_packed: Tensor, weight_scale: Tensor, global_scale: Tensor, *, is_divisor: bool) -> StoredWeight:
    """weight_packed uint8 [out, in / 2]; weight_scale e4m3 [out, in / 16]; one global scale for the tensor.

    is_divisor: compressed-tensors' `weight_global_scale`; ModelOpt's `weight_scale_2` is a factor.
    """
    out_size, in_size = weight_packed.shape[0], 2 * weight_packed.shape[1]
    _shape("weight_scale", weight_scale, (out_size, in_size // 16))
    factor = float(global_scale.float().max())
    factor = 1.0 / factor if is_divisor else factor
    # As large as fits into the units that the kernels keep scales in; the rest of it is in the global factor.
    scales = weight_scale.float() * 2.0**-8
    return StoredWeight(_fp4_elements(weight_packed), scales, None, "fp4", 16, factor * 2.0**8)


def read_mxfp4(blocks: Tensor, scales: Tensor) -> StoredWeight:
    """blocks uint8 [out, in / 32, 16]; scales [out, in / 32] as e8m0, powers of two, or its bytes."""
    out_size, num_groups = blocks.shape[0], blocks.shape[1]
    _shape("scales", scales, (out_size, num_groups))
    powers = torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.view(torch.uint8).int() - E8M0_BIAS)
    return StoredWeight(_fp4_elements(blocks.reshape(out_size, -1)), powers, None, "fp4", 32)
