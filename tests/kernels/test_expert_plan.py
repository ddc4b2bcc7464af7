"""The work list of experts: every pair once, blocks of one expert, the order kept, whatever the routing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cb_backend.kernels.expert_plan import ExpertPlan, max_blocks, plan_experts, plan_experts_torch
from cb_backend.kernels.launch import overriding


def check(plan: ExpertPlan, ids: Tensor, num_experts: int) -> None:
    """Holds a plan to what its docstring says; num_experts: those that are here."""
    flat = ids.flatten().tolist()
    num_blocks, block_m = int(plan.num_blocks), plan.block_m
    assert plan.num_pairs == len(flat)
    assert num_blocks <= plan.bound == max_blocks(len(flat), num_experts, block_m)
    experts = plan.experts[:num_blocks].tolist()
    assert experts == sorted(experts)
    rows = plan.pairs[: num_blocks * block_m].view(num_blocks, block_m).tolist()
    found: dict[int, list[int]] = {}
    for block, (expert, row) in enumerate(zip(experts, rows, strict=True)):
        pairs = [pair for pair in row if pair != len(flat)]
        assert row == pairs + [len(flat)] * (block_m - len(pairs))  # padding last
        is_last = block + 1 == num_blocks or experts[block + 1] != expert
        assert pairs if is_last else len(pairs) == block_m
        found.setdefault(expert, []).extend(pairs)
    wanted = {e: [p for p, each in enumerate(flat) if each == e] for e in range(num_experts)}
    assert found == {e: pairs for e, pairs in wanted.items() if pairs}
    assert {expert: pairs.tolist() for expert, pairs in plan.by_expert()} == found


def routings(num_tokens: int, top_k: int, num_experts: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens * 31 + num_experts)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    ids = scores.topk(top_k)[1].int()
    skewed = (scores * torch.linspace(4, 0.1, num_experts)).topk(top_k)[1].int()
    with_padding = torch.where((torch.arange(num_tokens) % 3 == 0).unsqueeze(1), num_experts, ids)
    return {
        "even": ids,
        "skewed": skewed,
        "one expert": torch.full_like(ids, num_experts - 1),
        "padding": with_padding,
        "all padding": torch.full_like(ids, num_experts),
    }


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts", "block_m"), [
    (1, 2, 4, 16), (1, 8, 32, 16), (7, 3, 8, 32), (16, 4, 32, 16), (300, 2, 5, 64), (129, 1, 12, 16), (33, 6, 20, 128),
])  # fmt: skip
def test_kernel_and_twin_list_every_pair_once(
    num_tokens: int, top_k: int, num_experts: int, block_m: int, device: torch.device
) -> None:
    for ids in routings(num_tokens, top_k, num_experts).values():
        with overriding("plan_experts", {"block_m": block_m}):
            check(plan_experts(ids.to(device), num_experts), ids, num_experts)
        check(plan_experts_torch(ids, num_experts), ids, num_experts)


@pytest.mark.parametrize(("num_experts", "num_here"), [(8, 4), (6, 1)])
def test_pairs_of_experts_that_are_not_here_take_no_block(
    num_experts: int, num_here: int, device: torch.device
) -> None:
    """A block has as many rows as on one device, which has the same rows an expert."""
    given = routings(48, 3, num_experts)
    for ids in (given[name].clamp(max=num_here) for name in ("skewed", "padding")):  # as `route` has them
        for plan in (
            plan_experts(ids.to(device), num_experts, num_here=num_here),
            plan_experts_torch(ids, num_experts, num_here=num_here),
        ):
            check(plan, ids, num_here)
            assert plan.num_experts == num_experts
    whole, own = (plan_experts(ids.to(device), num_experts, num_here=each) for each in (None, num_here))
    assert own.block_m == whole.block_m


def test_no_tokens(device: torch.device) -> None:
    ids = torch.zeros(0, 2, dtype=torch.int32)
    for plan in (plan_experts(ids.to(device), 4), plan_experts_torch(ids, 4)):
        assert plan.bound == 0
        assert int(plan.num_blocks) == 0


def test_the_bound_holds_for_every_number_of_pairs() -> None:
    """The worst routing: as many experts as can be with a pair each, the rest full blocks of one of them."""
    for num_pairs in range(1, 200):
        for num_experts in (1, 3, 8, 64):
            hit = min(num_pairs, num_experts)
            counts = [1] * hit
            counts[0] += num_pairs - hit
            for block_m in (16, 32):
                worst = sum(-(-count // block_m) for count in counts)
                assert worst <= max_blocks(num_pairs, num_experts, block_m)


def test_the_twin_lists_every_pair_of_larger_ones() -> None:
    """The kernel's are compiled and run on a GPU: interpreted, a program an expert takes long."""
    for shape in ((64, 8, 128), (257, 8, 128), (64, 4, 256)):
        for ids in routings(*shape).values():
            check(plan_experts_torch(ids, shape[2]), ids, shape[2])
