"""qkv post-processing: kernel and twin against the same steps in float64, a head at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from cb_backend.kernels.qkv_post import SMALL_STEP, qkv_post, qkv_post_torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
EPS = 1e-6
POISON = 777.0


@dataclass(frozen=True, kw_only=True)
class Case:
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    block_size: int
    has_norm: bool = False
    rounds_first: bool = True
    is_norm_wide: bool = False
    has_q_scale: bool = False
    dtype: torch.dtype = torch.float32


CASES = [
    Case(num_tokens=5, num_heads=3, num_kv_heads=1, head_dim=20, rotary_dim=12, block_size=5),
    Case(num_tokens=3, num_heads=7, num_kv_heads=7, head_dim=80, rotary_dim=80, block_size=16, has_norm=True),
    Case(num_tokens=1, num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=32, block_size=32, has_norm=True,
         dtype=torch.float16),
    Case(num_tokens=4, num_heads=6, num_kv_heads=2, head_dim=128, rotary_dim=128, block_size=16, has_norm=True,
         dtype=torch.bfloat16),
    Case(num_tokens=SMALL_STEP + 1, num_heads=3, num_kv_heads=2, head_dim=8, rotary_dim=6, block_size=32),
    Case(num_tokens=SMALL_STEP + 1, num_heads=34, num_kv_heads=1, head_dim=4, rotary_dim=4, block_size=32,
         has_norm=True),
    Case(num_tokens=3, num_heads=4, num_kv_heads=2, head_dim=16, rotary_dim=16, block_size=16, has_norm=True,
         rounds_first=False, is_norm_wide=True, dtype=torch.bfloat16),
    Case(num_tokens=SMALL_STEP + 1, num_heads=3, num_kv_heads=1, head_dim=8, rotary_dim=4, block_size=32,
         has_norm=True, rounds_first=False, dtype=torch.float16),
    Case(num_tokens=3, num_heads=4, num_kv_heads=2, head_dim=16, rotary_dim=12, block_size=16, has_q_scale=True),
    Case(num_tokens=SMALL_STEP + 1, num_heads=3, num_kv_heads=1, head_dim=8, rotary_dim=8, block_size=32,
         has_norm=True, has_q_scale=True, dtype=torch.float16),
    Case(num_tokens=0, num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=64, block_size=16),
]  # fmt: skip


def turned(head: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """One head [head_dim] rotated pair by pair: dimension i with dimension i + half."""
    result = head.clone()
    half = len(angles)
    for i, angle in enumerate(angles.tolist()):
        cos, sin = torch.tensor(angle).cos(), torch.tensor(angle).sin()
        result[i] = head[i] * cos - head[half + i] * sin
        result[half + i] = head[half + i] * cos + head[i] * sin
    return result


@pytest.mark.parametrize("function", [qkv_post, qkv_post_torch])
@pytest.mark.parametrize("case", CASES)
def test_kernel_and_twin(case: Case, function: object, device: torch.device) -> None:
    torch.manual_seed(case.head_dim)
    total = case.num_heads + 2 * case.num_kv_heads
    qkv = torch.randn(case.num_tokens, total * case.head_dim).to(case.dtype)
    angles = torch.rand(30, case.rotary_dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    scales = 1 + torch.rand(30, 1)
    if case.has_q_scale:
        table = torch.cat((table, scales), dim=1)
    rows = torch.randint(0, 30, (case.num_tokens,), dtype=torch.int32)
    slot_mapping = (torch.randperm(6 * case.block_size)[: case.num_tokens]).int()
    norm_dtype = torch.float32 if case.is_norm_wide else case.dtype
    norms = [torch.randn(case.head_dim).to(norm_dtype) if case.has_norm else None for _ in range(2)]
    shape = (6, 2, case.num_kv_heads, case.block_size, case.head_dim)
    kv_cache = torch.full(shape, POISON, dtype=case.dtype, device=device)
    out = torch.full((case.num_tokens, case.num_heads, case.head_dim), float("nan"), dtype=case.dtype, device=device)
    result = function(  # type: ignore[operator]
        qkv.to(device), table.to(device), rows.to(device),
        slot_mapping.to(device), kv_cache, case.num_heads, case.num_kv_heads, case.head_dim,
        *(None if norm is None else norm.to(device) for norm in norms), EPS, out=out,
        rounds_first=case.rounds_first,
    )  # fmt: skip
    assert result is out
    wanted_out, wanted_cache = torch.empty(out.shape).double(), torch.full(shape, POISON).double()
    for token in range(case.num_tokens):
        heads = qkv[token].double().view(total, case.head_dim)
        block, offset = divmod(int(slot_mapping[token]), case.block_size)
        for head in range(total):
            x, kind = heads[head], 0 if head < case.num_heads else 1 + (head >= case.num_heads + case.num_kv_heads)
            if kind < 2:
                weight = norms[kind]
                if weight is not None:
                    x = x / (x.square().mean() + EPS).sqrt() * weight.double()
                x = turned(x, angles[rows[token]])
            if kind == 0:
                wanted_out[token, head] = x * scales[rows[token]].double() if case.has_q_scale else x
            else:
                kv_head = (head - case.num_heads) % case.num_kv_heads
                wanted_cache[block, kind - 1, kv_head, offset] = x
    tolerances = {"atol": TOLERANCE[case.dtype], "rtol": TOLERANCE[case.dtype]}
    torch.testing.assert_close(out.cpu().double(), wanted_out, **tolerances)
    torch.testing.assert_close(kv_cache.cpu().double(), wanted_cache, **tolerances)  # nothing else was written
