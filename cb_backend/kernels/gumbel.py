"""Counter-based random numbers: Gumbel noise that is a function of (seed, position, token id) and of nothing else.

The same 32 bits come out of the twin and of the function that kernels call. Knows nothing of logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.launch import IS_INTERPRETING, jit, tl

# The interpreter runs no assembler.
HAS_APPROXIMATE_LOG = tl.constexpr(not IS_INTERPRETING) if tl is not None else False


@jit()
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit()
def _log2(x):
    """Within 2**-22: the hardware's own, a twentieth of the library's instructions."""
    if HAS_APPROXIMATE_LOG:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@jit()
def gumbel_noise_log2(seed, position, token_ids):
    """`gumbel_noise_torch` divided by ln 2, out of the same bits. seed, position int64 scalars; token_ids [n] int32."""
    key = _mix(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)
    key = _mix(_mix(key) ^ position.to(tl.uint32)) ^ (position >> 32).to(tl.uint32)
    stride = _mix(key ^ 0xFFFFFFFF) | 1
    bits = _mix(token_ids.to(tl.uint32) * stride + key)
    u = bits.to(tl.float32) * 2.0**-32 + 2.0**-33
    # A small exponential decides who wins, and there 1 - u has lost the bits that the series keeps.
    series = u + u * u * (0.5 + u * (1.0 / 3.0 + u * 0.25))
    exponential = tl.where(u < 2.0**-6, series, _log2(1.0 - tl.minimum(u, 1.0 - 2.0**-24)) * -0.6931471805599453)
    return -_log2(exponential)


def gumbel_noise_torch(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [num_rows, vocab_size] fp32: -log(E), E exponential, out of `random_bits_torch`."""
    bits = random_bits_torch(seeds, positions, vocab_size)
    u = (bits.long() & 0xFFFFFFFF).float() * 2.0**-32 + 2.0**-33
    # Small E decides who wins: near 0 the series keeps the bits that 1 - u would round away.
    exponential = torch.where(u < 1e-3, u + u * u * (0.5 + u * (1 / 3)), -(1 - u.clamp(max=1 - 2.0**-24)).log())
    return -exponential.log()


def random_bits_torch(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """32 random bits a (row, token id), as int32 [num_rows, vocab_size].

    A row's key, mixed three times, gives it a start and an odd stride; a token's bits are the mixed value of the place
    where its id stands on that row's walk through all 32-bit numbers. One round a token: with a batch of 256 the
    hashing, not the logits, bounds the sampler.
    """
    low, high = seeds.to(torch.int32), (seeds >> 32).to(torch.int32)
    position_low, position_high = positions.to(torch.int32), (positions >> 32).to(torch.int32)
    key = _mix_torch(_mix_torch(_mix_torch(low) ^ high) ^ position_low) ^ position_high
    stride = _mix_torch(~key) | 1
    ids = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    return _mix_torch(ids * stride.unsqueeze(1) + key.unsqueeze(1))


def _mix_torch(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every input bit moves every output bit (int32 arithmetic wraps)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _as_int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _as_int32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value
