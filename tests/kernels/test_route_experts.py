"""Weights and plan of a router's logits: in one launch or two, they are what the twins of the two say."""

from __future__ import annotations

import pytest
import torch

from cb_backend.kernels import route_experts as module
from cb_backend.kernels.launch import overriding
from cb_backend.kernels.route import Routing, route_torch
from cb_backend.kernels.route_experts import route_experts, route_experts_torch
from cb_backend.layers.ops import resolve_ops

from .test_expert_plan import check
from .test_route import inputs

SHAPES = [
    (1, 8, 2),
    (1, 128, 8),
    (3, 8, 3),
    (16, 12, 4),
    (7, 5, 1),
    (8, 60, 6),
    (16, 6, 2),
    (17, 8, 2),
    (20, 16, 4),
    (8, 32, 4),
]


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"renormalise": True, "scale": 1.5}, {"scoring": "softmax_of_top_k"}, {"scoring": "sigmoid"}],
    ids=str,
)
def test_kernel_and_twin(
    num_tokens: int, num_experts: int, top_k: int, options: dict[str, object], device: torch.device
) -> None:
    routing = Routing(top_k, **options)  # type: ignore[arg-type]
    logits, slots, parts = inputs(num_tokens, num_experts, device)
    if num_tokens == 1:
        slots += 1
    twin_parts = parts.cpu().clone()
    ids, wanted = route_torch(logits.cpu(), slots.cpu(), twin_parts.clone(), routing)
    with overriding("plan_experts", {"block_m": 16}):
        found = route_experts(logits, slots, parts, routing)
    for weights, plan in (found, route_experts_torch(logits.cpu(), slots.cpu(), twin_parts, routing)):
        torch.testing.assert_close(weights.cpu(), wanted, atol=1e-6, rtol=1e-5)
        check(plan, ids, num_experts)
    assert torch.equal(parts.cpu(), twin_parts)


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_devices_of_spread_experts_have_every_pair_once(num_tokens: int, device: torch.device) -> None:
    """Of the real rows, each at its expert; so the sum of their parts is that of one device."""
    logits, slots, parts = inputs(num_tokens, 12, device, num_parts=4)
    slots += num_tokens == 1
    routing = Routing(4, renormalise=True)
    _, whole = route_experts_torch(logits.cpu(), slots.cpu(), parts.cpu().clone(), routing)
    wanted = {expert: pairs.tolist() for expert, pairs in whole.by_expert()}
    for function, where in ((route_experts, device), (route_experts_torch, torch.device("cpu"))):
        found = {}
        for first in (0, 4, 8):
            own = routing._replace(first_here=first, num_here=4)
            _, plan = function(logits.to(where), slots.to(where), parts.to(where).clone(), own)
            found |= {first + expert: pairs.tolist() for expert, pairs in plan.by_expert()}
        assert found == wanted


@pytest.mark.parametrize("num_tokens", [1, 4, 16])
def test_steps_of_padding_alone_read_no_expert(num_tokens: int, device: torch.device) -> None:
    logits, slots, parts = inputs(num_tokens, 8, device)
    weights, plan = route_experts(logits, torch.zeros_like(slots), parts, Routing(2))
    assert int(plan.num_blocks) == 0
    assert not weights.any()
    assert not parts.any()


def test_a_single_row_takes_one_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []
    for name in ("route", "plan_experts"):
        monkeypatch.setattr(module, name, lambda *args, name=name, **kwargs: (launches.append(name), None))
    for num_tokens in (1, 2, 8, 17):
        launches.clear()
        logits, slots, parts = inputs(num_tokens, 16, device)
        route_experts(logits, slots, parts, Routing(8))
        assert launches == ([] if num_tokens == 1 else ["route", "plan_experts"])


def test_a_row_that_is_not_a_number_stays_within_the_experts(device: torch.device) -> None:
    """Its answer is lost, and its neighbour's is not."""
    for bad in ([float("nan")] * 12, [float("-inf")] * 12, [float("nan")] * 10 + [1.0, 2.0], [float("inf")] * 12):
        logits, slots, parts = inputs(8, 12, device)
        logits[:6] = torch.tensor(bad, device=device)
        weights, plan = route_experts(logits, slots + 1, parts, Routing(8))
        alone, _ = route_experts(logits[6:], slots[6:] + 1, parts[6:], Routing(8))
        torch.testing.assert_close(weights[6:], alone)
        pairs = sorted(int(pair) for _, own in plan.by_expert() for pair in own)
        assert pairs == list(range(64))  # each once, though the bad rows agree in all of their experts
        assert all(0 <= each < 12 for each in plan.experts[: int(plan.num_blocks)].tolist())


@pytest.mark.parametrize(("backend", "function"), [("torch", route_experts_torch), ("triton", route_experts)])
def test_layers_find_it(backend: str, function: object) -> None:
    assert resolve_ops(backend).route_experts is function
