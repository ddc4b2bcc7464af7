"""Routing: kernel and twin against a plain loop, in every form of scoring; padding goes nowhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cb_backend.kernels.route import LEAST_SUM, Routing, route, route_torch

ROUTINGS = [
    Routing(3),
    Routing(2, renormalise=True),
    Routing(4, "softmax_of_top_k"),
    Routing(3, "sigmoid", renormalise=True, scale=2.5),
    Routing(3, "sigmoid", num_groups=4, top_groups=2),
    Routing(1),
]


def by_hand(row: list[float], routing: Routing, bias: list[float] | None) -> tuple[list[int], list[float]]:
    """One row, in Python's numbers."""
    logits = torch.tensor(row, dtype=torch.float64)
    scores = {"softmax": logits.softmax(0), "softmax_of_top_k": logits, "sigmoid": logits.sigmoid()}[routing.scoring]
    choice = [float(score) + (bias[e] if bias else 0.0) for e, score in enumerate(scores)]
    size = len(row) // routing.num_groups
    groups = [choice[g * size : (g + 1) * size] for g in range(routing.num_groups)]
    ranks = [sum(sorted(group)[-2:]) for group in groups]
    open_groups = sorted(range(routing.num_groups), key=lambda g: (-ranks[g], g))[: routing.top_groups]
    allowed = [e for e in range(len(row)) if e // size in open_groups]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[: routing.top_k]
    weights = scores[ids]
    if routing.scoring == "softmax_of_top_k":
        weights = weights.softmax(0)
    if routing.renormalise:
        weights = weights / (weights.sum() + LEAST_SUM)
    return ids, (weights * routing.scale).tolist()


def inputs(
    num_tokens: int, num_experts: int, device: torch.device, num_parts: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits of strided rows, slots of which some are padding, parts)"""
    torch.manual_seed(num_tokens * num_experts)
    logits = torch.randn(num_tokens, num_experts + 5).to(device)[:, :num_experts]
    slots = torch.arange(num_tokens, dtype=torch.int32).to(device) % 4
    return logits, slots, torch.full((num_tokens, num_parts, 37), 7.0, device=device)


@pytest.mark.parametrize("num_experts", [8, 12, 60])
@pytest.mark.parametrize(
    ("routing", "has_bias"),
    [(each, False) for each in ROUTINGS] + [(each, True) for each in ROUTINGS if each.scoring == "sigmoid"],
    ids=str,
)
def test_kernel_and_twin_choose_as_a_plain_loop(
    routing: Routing, num_experts: int, has_bias: bool, device: torch.device
) -> None:
    logits, slots, parts = inputs(6, num_experts, device)
    bias = torch.linspace(-0.5, 0.5, num_experts)[torch.randperm(num_experts)].to(device) if has_bias else None
    twin_parts = parts.cpu().clone()
    cpu_bias = None if bias is None else bias.cpu()
    for ids, weights in (
        route(logits, slots, parts, routing, bias),
        route_torch(logits.cpu(), slots.cpu(), twin_parts, routing, cpu_bias),
    ):
        assert ids.dtype == torch.int32
        assert weights.dtype == torch.float32
        for row in range(6):
            if int(slots[row]) == 0:
                assert ids[row].tolist() == [num_experts] * routing.top_k
                assert weights[row].tolist() == [0.0] * routing.top_k
                continue
            wanted_ids, wanted = by_hand(logits[row].tolist(), routing, None if bias is None else bias.tolist())
            assert ids[row].tolist() == wanted_ids
            torch.testing.assert_close(weights[row].cpu(), torch.tensor(wanted), atol=1e-6, rtol=1e-5)
    for zeroed in (parts.cpu(), twin_parts):  # those of padding, and no others
        assert torch.equal(zeroed, torch.where(slots.cpu() == 0, 0.0, 7.0).view(-1, 1, 1).expand_as(zeroed))


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_of_spread_experts_each_device_has_its_own_pairs(
    routing: Routing, num_devices: int, device: torch.device
) -> None:
    """Chosen and weighed as on one device; the parts that nobody on the device writes are 0, and no others."""
    num_tokens, num_experts, k = 6, 8, routing.top_k
    logits, slots, parts = inputs(num_tokens, num_experts, device, num_parts=k + 1)
    ids, wanted = route_torch(logits.cpu(), slots.cpu(), parts.cpu().clone(), routing)
    num_here = num_experts // num_devices
    for first in range(0, num_experts, num_here):
        own = routing._replace(first_here=first, num_here=num_here)
        is_here = (ids >= first) & (ids < first + num_here)
        left = torch.full_like(parts.cpu(), 7.0)
        left[:, :k][~is_here] = 0.0
        left[slots.cpu() == 0] = 0.0
        its_parts, twin_parts = parts.clone(), parts.cpu().clone()
        for (found, weights), zeroed in (
            (route(logits, slots, its_parts, own), its_parts),
            (route_torch(logits.cpu(), slots.cpu(), twin_parts, own), twin_parts),
        ):
            assert torch.equal(found.cpu(), torch.where(is_here, ids - first, num_here))
            assert 0 <= int(found.min()) <= int(found.max()) <= num_here, "a plan of experts may be given no others"
            torch.testing.assert_close(weights.cpu(), wanted, atol=1e-6, rtol=1e-5)
            assert torch.equal(zeroed.cpu(), left)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_scores_go_to_the_lower_expert(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5], dtype=dtype, device=device)
    slots = torch.ones(2, dtype=torch.int32, device=device)
    parts = torch.zeros(2, 1, 1, device=device)
    for ids, _ in (
        route(logits, slots, parts, Routing(4)),
        route_torch(logits.cpu(), slots.cpu(), parts.cpu(), Routing(4)),
    ):
        assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


def test_a_row_that_is_not_a_number_stays_within_the_experts(device: torch.device) -> None:
    """Its answer is lost; the kernel must not read or write past anything for it."""
    logits = torch.full((1, 6), float("nan"), device=device)
    slots, parts = torch.ones(1, dtype=torch.int32, device=device), torch.zeros(1, 2, 4, device=device)
    for routing in (Routing(2), Routing(2, "softmax_of_top_k"), Routing(2, "sigmoid", num_groups=2)):
        ids, _ = route(logits, slots, parts, routing)
        assert all(0 <= each < 6 for each in ids.flatten().tolist())


def test_no_rows(device: torch.device) -> None:
    logits, slots, parts = inputs(0, 8, device)
    ids, weights = route(logits, slots, parts, Routing(3))
    assert ids.shape == weights.shape == (0, 3)
