"""Counter-based random numbers: Gumbel noise that is a function of (seed, position, token id) and of nothing else.

The same 32 bits come out of the twin and of the functions that kernels call: one for any tokens, and one that only
bounds the noise of a tile's tokens from above, at a quarter of the cost. Knows nothing of logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.launch import IS_INTERPRETING, jit, tl

# The interpreter runs no assembler.
HAS_ASSEMBLER = tl.constexpr(not IS_INTERPRETING) if tl is not None else False


@jit()
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit()
def _log2(x):
    """Within 2**-22, of no subnormal: the hardware's own, a twentieth of the library's instructions."""
    if HAS_ASSEMBLER:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@jit()
def _one_to_two(word):
    """1 + (the upper 23 bits of `word`) / 2 ** 23, fp32; one instruction, where the compiler would take two."""
    if HAS_ASSEMBLER:
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, 0x7f, 9;", "=f,r", [word], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True)


@jit()
def _row_keys(seed, position):
    """Start and odd stride of a row's walk through all 32-bit numbers; seed, position int64 scalars."""
    key = _mix(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)
    key = _mix(_mix(key) ^ position.to(tl.uint32)) ^ (position >> 32).to(tl.uint32)
    return key, _mix(key ^ 0xFFFFFFFF) | 1


@jit()
def _words(key, stride, pairs):
    """The words of tokens 2 * pairs and 2 * pairs + 1; the upper bits of a word are its good ones."""
    word = pairs.to(tl.uint32) * stride + key
    word = (word ^ (word >> 16)) * 0x7FEB352D
    even = (word ^ (word >> 15)) * 0x846CA68B
    return even, (even ^ (even >> 16)) * 0x9E3779B1


@jit()
def gumbel_noise_log2(seed, position, token_ids):
    """`gumbel_noise_torch` divided by ln 2, out of the same bits. seed, position int64 scalars; token_ids [n] int32."""
    key, stride = _row_keys(seed, position)
    even, odd = _words(key, stride, token_ids >> 1)
    word = tl.where((token_ids & 1) == 1, odd, even)
    u = (word ^ ((word >> 16) & 0x1FF)).to(tl.float32) * 2.0**-32 + 2.0**-33
    # A small exponential decides who wins, and there 1 - u has lost the bits that the series keeps.
    series = u + u * u * (0.5 + u * (1.0 / 3.0 + u * 0.25))
    exponential = tl.where(u < 2.0**-6, series, _log2(1.0 - tl.minimum(u, 1.0 - 2.0**-24)) * -0.6931471805599453)
    return -_log2(exponential)


@jit()
def least_uniforms_log2(seed, position, pairs):
    """log2(u), u rounded down, of tokens 2 * pairs and 2 * pairs + 1: -log2(u) >= -log2(E), their noise, as E >= u."""
    key, stride = _row_keys(seed, position)
    even, odd = _words(key, stride, pairs)
    return _log2(_at_most(even)), _log2(_at_most(odd))


@jit()
def _at_most(word):
    """The u of a word, rounded down; of the smallest, the least there is."""
    return tl.maximum(_one_to_two(word) - 1.0, 2.0**-33)


def gumbel_noise_torch(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [num_rows, vocab_size] fp32: -log(E), E exponential, out of `random_bits_torch`."""
    bits = random_bits_torch(seeds, positions, vocab_size)
    u = (bits.long() & 0xFFFFFFFF).float() * 2.0**-32 + 2.0**-33
    # Small E decides who wins: near 0 the series keeps the bits that 1 - u would round away.
    exponential = torch.where(u < 1e-3, u + u * u * (0.5 + u * (1 / 3)), -(1 - u.clamp(max=1 - 2.0**-24)).log())
    return -exponential.log()


def random_bits_torch(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """32 random bits a (row, token id), as int32 [num_rows, vocab_size].

    A row's key, mixed three times, gives it a start and an odd stride. Two neighbours' ids, halved, are the place where
    they stand on that row's walk through all 32-bit numbers: the place, mixed, is the word of the even token, and mixed
    once more that of the odd one. Upper bits are xored into the lowest nine, which a product mixes least; the bound of
    the noise, which most tokens never get beyond, needs only the others.
    """
    low, high = seeds.to(torch.int32), (seeds >> 32).to(torch.int32)
    position_low, position_high = positions.to(torch.int32), (positions >> 32).to(torch.int32)
    key = _mix_torch(_mix_torch(_mix_torch(low) ^ high) ^ position_low) ^ position_high
    stride = _mix_torch(~key) | 1
    pairs = torch.arange((vocab_size + 1) // 2, dtype=torch.int32, device=seeds.device)
    word = _times(pairs * stride.unsqueeze(1) + key.unsqueeze(1), 16, 0x7FEB352D)
    even = _times(word, 15, 0x846CA68B)
    words = torch.stack((even, _times(even, 16, 0x9E3779B1)), dim=-1).flatten(1)[:, :vocab_size]
    return words ^ ((words >> 16) & 0x1FF)


def _mix_torch(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every input bit moves every output bit (int32 arithmetic wraps)."""
    x = _times(_times(x, 16, 0x7FEB352D), 15, 0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _times(x: Tensor, shift: int, factor: int) -> Tensor:
    """(x ^ (x >> shift)) * factor of 32 bits without sign; factor odd: a bijection."""
    return (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * (factor - 2**32 if factor >= 2**31 else factor)
