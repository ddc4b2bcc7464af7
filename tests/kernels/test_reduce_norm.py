"""Sums over ranks fused into addition and norm: the kernel of one rank, the others' words and sums put there by hand.

What needs a peer that runs at the same time is not here: only GPUs have that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.kernels.reduce_norm import MAX_RANKS, PLACES, Peers, reduce_add_norm, reduce_add_norm_torch

EPS = 1e-5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


class Shared:
    """The memory of all ranks, on one device; every rank but `rank` has said that it has come to `place` of `step`."""

    def __init__(self, rank: int, num_ranks: int, parts: list[Tensor], step: int, place: int) -> None:
        device = parts[0].device
        self.parts, self.number = parts, step * PLACES + place
        other = [torch.full_like(part, float("nan")) for part in parts]
        buffers = [parts, other] if place % 2 == 0 else [other, parts]
        self.words = torch.zeros(num_ranks, MAX_RANKS, dtype=torch.int64, device=device)
        self.words[rank, :num_ranks] = self.number
        self.words[rank, rank] = 0
        self._kept = other
        addresses = torch.zeros(2, MAX_RANKS, dtype=torch.int64)
        for index, ranks in enumerate(buffers):
            addresses[index, :num_ranks] = torch.tensor([part.data_ptr() for part in ranks])
        of_words = torch.zeros(MAX_RANKS, dtype=torch.int64)
        of_words[:num_ranks] = torch.tensor([words.data_ptr() for words in self.words])
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)
        self.peers = Peers(
            addresses.to(device),
            of_words.to(device),
            self.words[rank],
            torch.tensor([step], device=device),
            self.failed,
            rank,
            num_ranks,
        )


def tensors(num_ranks: int, num_tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The ranks' parts, the residual, two weights."""
    torch.manual_seed(num_ranks + size)
    shapes = [(num_tokens, size)] * (num_ranks + 1) + [(size,)] * 2
    return [torch.randn(shape).to(dtype).to(device) for shape in shapes]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"has_post": True},
    {"x_scale": 0.25},
    {"rounds_first": False},
    {"has_weight": False},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_a_rank_adds_up_the_sums_of_all(
    num_ranks: int, dtype: torch.dtype, options: dict[str, Any], device: torch.device
) -> None:
    *parts, residual, weight, post_weight = tensors(num_ranks, 3, 40, dtype, device)
    given = {
        "weight": weight if options.get("has_weight", True) else None,
        "eps": EPS,
        "post_weight": post_weight if options.get("has_post") else None,
        **{name: value for name, value in options.items() if not name.startswith("has_")},
    }
    shared = Shared(num_ranks - 1, num_ranks, parts, step=5, place=2)
    found = reduce_add_norm(shared.peers, 2, residual, **given)
    wanted = reduce_add_norm_torch(parts, residual, **given)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert int(shared.failed) == 0


@pytest.mark.parametrize("place", [0, 1, 7, PLACES - 1])
def test_a_rank_says_where_it_is_to_every_rank(place: int, device: torch.device) -> None:
    """In its own word of each, and reads the buffer whose turn it is: the other one holds NaN."""
    *parts, residual, weight, _ = tensors(3, 2, 16, torch.float32, device)
    shared = Shared(1, 3, parts, step=3, place=place)
    before = shared.words.clone()
    normed, _ = reduce_add_norm(shared.peers, place, residual, weight, EPS)
    assert normed.isfinite().all()
    before[:, 1] = 3 * PLACES + place
    assert torch.equal(shared.words, before)


def test_numbers_grow_from_step_to_step(device: torch.device) -> None:
    """The first place of a step is behind the last of the one before, for more steps than any process makes."""
    *parts, residual, weight, _ = tensors(2, 1, 16, torch.float32, device)
    step = 1 << 40
    shared = Shared(0, 2, parts, step=step, place=0)
    reduce_add_norm(shared.peers, 0, residual, weight, EPS)
    assert shared.words[1, 0] == step * PLACES > (step - 1) * PLACES + PLACES - 1


def test_nothing_is_launched_without_tokens(device: torch.device) -> None:
    shared = Shared(0, 2, [torch.zeros(1, 16, device=device)] * 2, step=1, place=0)
    residual, weight = torch.zeros(0, 16, device=device), torch.ones(16, device=device)
    normed, total = reduce_add_norm(shared.peers, 0, residual, weight, EPS)
    assert (normed.shape, total.shape) == ((0, 16), (0, 16))
    assert shared.words[1, 0] == 0


CASES = {
    f"{num_ranks} ranks, sm_{arch}": {
        "op": "reduce_norm", "kernel": "_reduce_norm_kernel", "arch": arch,
        "call": {"hidden_size": 4096, "num_ranks": num_ranks},
    }
    for num_ranks in (2, 4, 8)
    for arch in (90, 100)
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_the_compiler_makes_of_it(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    """Words are written and read over the system's memory order, rows in whole vectors, and nothing spills."""
    report, num_ranks = compiled[name], CASES[name]["call"]["num_ranks"]
    assert report["stack_bytes"] == 0
    assert report["registers"] <= 128
    assert report["waits"]
    assert report["stores_before_wait"] == 0
    assert report["system_releases"] >= num_ranks
    assert report["system_acquires"] >= num_ranks
    assert report["narrow_loads"] == 0
