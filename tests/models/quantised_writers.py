"""Writers of quantised projections: each packs integers by its format's own rule, apart from the product's readers.

A writer gives the tensors that a checkpoint has for one projection, by suffix, and the weight they stand for in
float64. Element by element and slow on purpose: what they do can be compared with a format's description.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
Written = tuple[dict[str, Tensor], Tensor]


def to_int32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def pack_along(rows: list[list[int]], bits: int) -> Tensor:
    """Rows of small integers as int32 words, lowest bits first."""
    per_word = 32 // bits
    return torch.tensor(
        [
            [
                to_int32(sum(value << (bits * i) for i, value in enumerate(row[start : start + per_word])))
                for start in range(0, len(row), per_word)
            ]
            for row in rows
        ],
        dtype=torch.int32,
    )


def draw(out_size: int, in_size: int, group: int, bits: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(stored integers [out, in], zero points [out, groups], scales [out, groups] of dtype)."""
    generator = torch.Generator().manual_seed(seed)
    groups = in_size // group
    stored = torch.randint(0, 2**bits, (out_size, in_size), generator=generator)
    zeros = torch.randint(1, 2**bits, (out_size, groups), generator=generator)
    scales = (torch.rand(out_size, groups, generator=generator) + 0.5) / 2**bits / in_size**0.5
    return stored, zeros, scales.to(dtype)


def each_column(by_group: Tensor, group: int) -> Tensor:
    return by_group.double().repeat_interleave(group, 1)


def write_awq(out_size: int, in_size: int, group: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Written:
    stored, zeros, scales = draw(out_size, in_size, group, 4, seed, dtype)

    def words(rows: Tensor) -> Tensor:
        mixed = [[row[8 * (j // 8) + AWQ_COLUMNS[j % 8]] for j in range(len(row))] for row in rows.tolist()]
        return pack_along(mixed, 4)

    tensors = {"qweight": words(stored.t()), "qzeros": words(zeros.t()), "scales": scales.t().contiguous()}
    return tensors, (stored - each_column(zeros, group)) * each_column(scales, group)


def write_gptq(
    out_size: int,
    in_size: int,
    group: int,
    *,
    bits: int = 4,
    is_v2: bool = False,
    is_symmetric: bool = False,
    is_act_order: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float16,
) -> Written:
    group = in_size if group == -1 else group
    stored, zeros, scales = draw(out_size, in_size, group, bits, seed, dtype)
    if is_symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    g_idx = torch.arange(in_size) // group
    if is_act_order:
        g_idx = g_idx[torch.randperm(in_size, generator=torch.Generator().manual_seed(seed))]
    kept = zeros if is_v2 else (zeros - 1) % 2**bits
    tensors = {
        "qweight": pack_along(stored.tolist(), bits).t().contiguous(),
        "qzeros": pack_along(kept.t().tolist(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": g_idx.int(),
    }
    return tensors, (stored - zeros.double()[:, g_idx]) * scales.double()[:, g_idx]


def write_pack_quantized(
    out_size: int,
    in_size: int,
    group: int,
    *,
    bits: int = 4,
    has_zeros: bool = False,
    are_zeros_packed: bool = True,
    is_act_order: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Written:
    group = in_size if group == -1 else group
    stored, zeros, scales = draw(out_size, in_size, group, bits, seed, dtype)
    middle = 2 ** (bits - 1)
    zeros = zeros if has_zeros else torch.full_like(zeros, middle)
    g_idx = torch.arange(in_size) // group
    if is_act_order:
        g_idx = g_idx[torch.randperm(in_size, generator=torch.Generator().manual_seed(seed))]
    tensors = {
        "weight_packed": pack_along(stored.tolist(), bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out_size, in_size]),
    }
    if has_zeros and are_zeros_packed:
        tensors["weight_zero_point"] = pack_along(zeros.t().tolist(), bits).t().contiguous()
    elif has_zeros:
        tensors["weight_zero_point"] = (zeros - middle).to(torch.int8)
    if is_act_order:
        tensors["weight_g_idx"] = g_idx.int()
    return tensors, (stored - zeros.double()[:, g_idx]) * scales.double()[:, g_idx]


def write_int_quantized(out_size: int, in_size: int, seed: int = 0) -> Written:
    stored, _, scales = draw(out_size, in_size, in_size, 8, seed, torch.bfloat16)
    weight = (stored - 128).to(torch.int8)
    return {"weight": weight, "weight_scale": scales}, weight.double() * scales.double()


def write_fp8_blocks(
    out_size: int,
    in_size: int,
    block: tuple[int, int] = (128, 128),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scale_name: str = "weight_scale_inv",
) -> Written:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(out_size, in_size, generator=generator) * 50).to(torch.float8_e4m3fn)
    shape = (-(-out_size // block[0]), -(-in_size // block[1]))
    scale = ((torch.rand(shape, generator=generator) + 0.5) / 50 / in_size**0.5).to(dtype)
    whole = scale.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:out_size, :in_size]
    return {"weight": weight, scale_name: scale}, weight.double() * whole


def draw_fp4(out_size: int, in_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(codes [out, in], their values)."""
    codes = torch.randint(0, 16, (out_size, in_size), generator=generator)
    values = torch.tensor(FP4, dtype=torch.float64)[codes % 8] * (1 - 2.0 * (codes // 8))
    return codes, values


def pack_fp4(codes: Tensor) -> Tensor:
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def write_nvfp4(out_size: int, in_size: int, *, is_modelopt: bool = False, seed: int = 0) -> Written:
    generator = torch.Generator().manual_seed(seed)
    codes, values = draw_fp4(out_size, in_size, generator)
    scale = (torch.rand(out_size, in_size // 16, generator=generator) * 400 + 1).to(torch.float8_e4m3fn)
    factor = torch.tensor(1 / 1024 / in_size**0.5)
    weight = values * each_column(scale.double(), 16) * factor.double()
    if is_modelopt:
        return {"weight": pack_fp4(codes), "weight_scale": scale, "weight_scale_2": factor}, weight
    tensors = {"weight_packed": pack_fp4(codes), "weight_scale": scale, "weight_global_scale": (1 / factor).reshape(1)}
    return tensors, values * each_column(scale.double(), 16) / (1 / factor).double()


def write_mxfp4(out_size: int, in_size: int, seed: int = 0) -> Written:
    generator = torch.Generator().manual_seed(seed)
    codes, values = draw_fp4(out_size, in_size, generator)
    exponents = torch.randint(118, 124, (out_size, in_size // 32), generator=generator)
    blocks = pack_fp4(codes).view(out_size, in_size // 32, 16)
    return {"blocks": blocks, "scales": exponents.to(torch.uint8)}, values * each_column(2.0 ** (exponents - 127), 32)


def write_mxfp4_packed(out_size: int, in_size: int, seed: int = 0) -> Written:
    """The same by compressed-tensors' names, all of a row in one piece."""
    written, weight = write_mxfp4(out_size, in_size, seed)
    return {"weight_packed": written["blocks"].flatten(1), "weight_scale": written["scales"]}, weight
