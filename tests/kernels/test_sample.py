"""The sampler: what each row keeps, how often it draws it, and that kernel and twin draw the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.kernels import sample as module
from cb_backend.kernels import sample as sampler
from cb_backend.kernels.gumbel import gumbel_noise_log2, gumbel_noise_torch, least_uniforms_log2, random_bits_torch
from cb_backend.kernels.launch import jit, overriding, tl
from cb_backend.kernels.row_sampling import ROW_PARAMETERS, RowSampling

Sampled = tuple[Tensor, Tensor]
LOG_PROBS = [math.log(p) for p in (0.05, 0.5, 0.1, 0.2, 0.15)]


def _sampling(values: dict[str, Any]) -> dict[str, Any]:
    """The sampler's own arguments: row-wise parameters as one."""
    others = {name: value for name, value in values.items() if name not in ROW_PARAMETERS}
    return {"sampling": RowSampling(values[name] for name in ROW_PARAMETERS), **others}


def sample(logits: Tensor, **values: Any) -> Sampled:
    return sampler.sample(logits, **_sampling(values))


def sample_torch(logits: Tensor, **values: Any) -> Sampled:
    return sampler.sample_torch(logits, **_sampling(values))


def arguments(num_rows: int, **given: Any) -> dict[str, Tensor]:
    """One value a row of each parameter, or one for all; greedy and unfiltered where nothing is said."""
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "positions": 0}
    types = {"top_k": torch.int32, "seed": torch.int64, "positions": torch.int64}
    return {
        name: torch.tensor(given.get(name, default), dtype=types.get(name, torch.float32)).expand(num_rows).clone()
        for name, default in defaults.items()
    }


def frequencies(logits: list[float], num_draws: int = 20_000, **given: Any) -> list[float]:
    rows = torch.tensor(logits).expand(num_draws, -1)
    values = arguments(num_draws, temperature=1.0, **given) | {"positions": torch.arange(num_draws)}
    token_ids, is_failed = sample_torch(rows, **values)
    assert not is_failed.any()
    return (torch.bincount(token_ids.long(), minlength=len(logits)) / num_draws).tolist()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [0.05, 0.5, 0.1, 0.2, 0.15]),
        ({"seed": -3}, [0.05, 0.5, 0.1, 0.2, 0.15]),  # a seed above 2 ** 63
        ({"top_k": 2}, [0, 5 / 7, 0, 2 / 7, 0]),
        ({"top_k": 9}, [0.05, 0.5, 0.1, 0.2, 0.15]),
        ({"top_p": 0.6}, [0, 5 / 7, 0, 2 / 7, 0]),
        ({"top_p": 0.4}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.0}, [0, 1, 0, 0, 0]),
        ({"min_p": 0.25}, [0, 0.5 / 0.85, 0, 0.2 / 0.85, 0.15 / 0.85]),
        ({"top_k": 3, "top_p": 0.8}, [0, 5 / 7, 0, 2 / 7, 0]),  # 0.5 / 0.85 + 0.2 / 0.85 > 0.8
        ({"top_k": 3, "top_p": 0.9, "min_p": 0.35}, [0, 5 / 7, 0, 2 / 7, 0]),
    ],
)
def test_twin_draws_what_it_keeps(given: dict[str, float], expected: list[float]) -> None:
    found = frequencies(LOG_PROBS, **given)
    for frequency, probability in zip(found, expected, strict=True):
        # Five standard deviations of a count of 20,000 draws; nothing outside the kept set, ever.
        assert abs(frequency - probability) <= 5 * math.sqrt(probability * (1 - probability) / 20_000)


def test_ties_at_a_border_are_all_kept() -> None:
    tied = [0.0, 1.0, 0.0, 1.0, 0.0]
    assert [f > 0 for f in frequencies(tied, top_k=1)] == [False, True, False, True, False]
    assert [f > 0 for f in frequencies(tied, top_k=3)] == [True] * 5
    assert [f > 0 for f in frequencies(tied, top_p=0.1)] == [False, True, False, True, False]


def make_rows(vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows that differ in everything: greedy with a tie, NaN, all -inf, half -inf, +inf, each filter."""
    torch.manual_seed(vocab_size)
    logits = (4 * torch.randn(10, vocab_size)).to(dtype)
    logits[1, vocab_size // 3] = float("nan")
    logits[2] = float("-inf")
    logits[3, : vocab_size // 2] = float("-inf")
    logits[4, [3, vocab_size - 1]] = 60.0
    logits[5, 5] = float("inf")
    values = arguments(
        10,
        temperature=[0.0, 1.0, 0.7, 1.3, 0.0, 0.5, 0.8, 1.0, 2.0, 1e-6],
        top_k=[5, 0, 0, 7, 0, 2, 40, 0, 0, 3],
        top_p=[1.0, 0.9, 0.5, 0.7, 1.0, 0.5, 1.0, 0.8, 0.95, 0.1],
        min_p=[0.0, 0.0, 0.1, 0.0, 0.0, 0.2, 0.0, 0.0, 0.05, 0.0],
        seed=[1, 2, 3, -4, 5, 6, 2**62, 8, -(2**63), 10],
    )
    return logits, values


@pytest.mark.parametrize("has_filters", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_draws_what_the_twin_draws(dtype: torch.dtype, has_filters: bool, device: torch.device) -> None:
    logits, values = make_rows(300, dtype)
    logits, values = logits.to(device), {name: value.to(device) for name, value in values.items()}
    for position in (0, 41, 2**40):
        values["positions"].fill_(position)
        out = torch.full((10,), -7, dtype=torch.int32, device=device), torch.ones(10, dtype=torch.bool, device=device)
        token_ids, is_failed = sample(logits, **values, has_filters=has_filters, out=out)
        assert token_ids is out[0]
        assert is_failed.tolist() == [False, True, True, False, False, True, *[False] * 4]
        assert token_ids.tolist() == sample_torch(logits, **values, has_filters=has_filters)[0].tolist()
        assert token_ids[[1, 2, 5, 4]].tolist() == [0, 0, 0, 3]  # failed three times, the first of two equal ones
        assert token_ids[[0, 9]].tolist() == logits[[0, 9]].float().argmax(-1).tolist()


@pytest.mark.parametrize("listed", [16, 1024], ids=["list too short", "list long enough"])
def test_tiles_and_passes(listed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several tiles; a top-k that its list cannot hold is found by bisection of the whole row instead."""
    monkeypatch.setattr(module, "_LISTED", listed)
    torch.manual_seed(3)
    logits = (2 * torch.randn(12, 700)).to(device)
    values = arguments(
        12,
        temperature=1.5,
        top_k=[0, 1, 2, 5, 20, 60, 300, 699, 700, 50, 30, 0],
        top_p=[0.05, 1.0, 0.5, 0.9, 0.9, 1.0, 0.3, 0.99, 0.95, 0.2, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.01, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.3, 0.4],
        seed=list(range(12)),
    )
    values = {name: value.to(device) for name, value in values.items()}
    with overriding("sample", {"tile": 128, "num_warps": 4, "choose_num_warps": 4}):
        token_ids = sample(logits, **values)[0]
    assert token_ids.tolist() == sample_torch(logits, **values)[0].tolist()


def test_failures_and_ties_of_several_tiles(device: torch.device) -> None:
    """NaN or infinity in any tile fails a row; of equal logits in several tiles a greedy row takes the first."""
    torch.manual_seed(4)
    logits = torch.randn(8, 700)
    logits[0, [500, 130, 600]] = 9.0
    logits[1, :] = 0.25
    logits[2, 699], logits[3, 128], logits[4, 300] = float("nan"), float("inf"), float("-inf")
    logits[5, :690] = float("-inf")
    logits[6, :] = float("-inf")
    for temperature in (0.0, 0.9):
        values = {name: value.to(device) for name, value in arguments(8, temperature=temperature).items()}
        with overriding("sample", {"tile": 128, "num_warps": 4, "choose_num_warps": 4}):
            token_ids, is_failed = sample(logits.to(device), **values)
        assert is_failed.tolist() == [False, False, True, True, False, False, True, False]
        assert token_ids.tolist() == sample_torch(logits.to(device), **values)[0].tolist()
        if temperature == 0:
            assert token_ids[:2].tolist() == [130, 0]


@jit()
def _noise_kernel(noise_ptr, bound_ptr, seed_ptr, position_ptr, num_pairs: tl.constexpr):
    """Noise and its bound of tokens 0 to 2 * num_pairs - 1."""
    seed, position = tl.load(seed_ptr), tl.load(position_ptr)
    pairs, token_ids = tl.arange(0, num_pairs), tl.arange(0, 2 * num_pairs)
    even, odd = least_uniforms_log2(seed, position, pairs)
    tl.store(bound_ptr + 2 * pairs, -even)
    tl.store(bound_ptr + 2 * pairs + 1, -odd)
    tl.store(noise_ptr + token_ids, gumbel_noise_log2(seed, position, token_ids))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 123), (-(2**63), 2**40)])
def test_no_noise_exceeds_its_bound(seed: int, position: int, device: torch.device) -> None:
    """And the bound is close where it matters, of the largest noises; both are of the twin's bits."""
    num_tokens = 1 << 13
    noise, bound = (torch.full((num_tokens,), float("nan"), device=device) for _ in range(2))
    seeds, positions = (torch.tensor([value], device=device) for value in (seed, position))
    _noise_kernel[(1,)](noise, bound, seeds, positions, num_pairs=num_tokens // 2)
    wanted = gumbel_noise_torch(seeds, positions, num_tokens)[0] / math.log(2)
    torch.testing.assert_close(noise, wanted, atol=1e-4, rtol=1e-4)
    assert (noise <= bound + 1e-5).all()
    is_large = noise > 4  # one in 16
    assert (bound - noise)[is_large].max() < 0.1
    assert bound.max() <= 33


def test_a_draw_does_not_depend_on_the_batch(device: torch.device) -> None:
    logits, values = make_rows(130, torch.float32)
    logits, values = logits.to(device), {name: value.to(device) for name, value in values.items()}
    together = sample(logits, **values)[0]
    chosen = torch.tensor([7, 3, 8], device=device)
    alone = sample(logits[chosen], **{name: value[chosen] for name, value in values.items()})[0]
    assert alone.tolist() == together[chosen].tolist()


def test_no_rows(device: torch.device) -> None:
    token_ids, is_failed = sample(torch.zeros(0, 50, device=device), **{
        name: value.to(device) for name, value in arguments(0).items()
    })  # fmt: skip
    assert token_ids.shape == is_failed.shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_on_a_gpu(dtype: torch.dtype) -> None:
    """A real vocabulary; scores of the two may differ in a last bit, so one row in a hundred may."""
    torch.manual_seed(0)
    num_rows = 200
    logits = (3 * torch.randn(num_rows, 151_936, device="cuda")).to(dtype)
    rows = torch.arange(num_rows, device="cuda")
    values = {name: value.cuda() for name, value in arguments(num_rows, temperature=0.8).items()}
    values |= {"seed": rows * 12345, "top_k": (rows % 3 * 20).int(), "top_p": torch.where(rows % 2 == 0, 1.0, 0.9)}
    found, wanted = sample(logits, **values)[0], sample_torch(logits, **values)[0]
    assert (found != wanted).sum() <= 2


def test_random_bits_are_uniform_and_differ_between_rows() -> None:
    seeds, positions = torch.tensor([0, 0, 1, -1]), torch.tensor([0, 1, 0, 2**33])
    bits = random_bits_torch(seeds, positions, 1 << 16)
    assert len(bits.unique()) > 4 * 65536 - 40  # about 8 of 262,144 draws of 32 bits meet
    even, odd = bits[:, 0::2] >> 24 & 0xFF, bits[:, 1::2] >> 24 & 0xFF
    for first, second in ((even, odd), (odd[:, :-1], even[:, 1:])):  # neighbours have one word, mixed once or twice
        together = torch.bincount((first * 256 + second).long().flatten(), minlength=65536).float()
        expected = together.sum() / 65536
        assert ((together - expected).square() / expected).sum() < 65536 + 5 * math.sqrt(2 * 65536)
    for bit in range(32):  # each bit is a fair coin: 5 standard deviations of 65,536 throws
        assert (((bits >> bit) & 1).float().mean(1) - 0.5).abs().max() < 5 * 0.5 / 256
    low = bits & 0xFF
    together = torch.bincount((low[0] * 256 + low[1]).long(), minlength=65536).float()
    assert (together - 1).square().sum() < 65536 + 5 * math.sqrt(2 * 65536)  # chi-squared: two rows, no relation


def test_equal_logits_are_drawn_equally_often() -> None:
    """Of flat rows: winners are spread evenly, over halves of the vocabulary and over even and odd ids."""
    num_draws = 8192
    rows = torch.zeros(num_draws, 1024)
    token_ids, _ = sample_torch(rows, **arguments(num_draws, temperature=1.0) | {"positions": torch.arange(num_draws)})
    counts = torch.bincount(token_ids.long(), minlength=1024).float()
    assert (counts - 8).square().sum() / 8 < 1023 + 5 * math.sqrt(2 * 1023)
    for share in (counts[0::2], counts[:512]):
        assert abs(float(share.sum()) - num_draws / 2) < 5 * math.sqrt(num_draws) / 2
