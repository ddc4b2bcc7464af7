"""From a router's logits to the experts' work list: weights of each token's experts, and the plan of the products.

One launch for a single row, each of whose experts has a block; else the two of `route` and `expert_plan`, and so where
experts are spread over devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.kernels.expert_plan import ExpertPlan, new_plan, plan_experts, plan_experts_torch
from cb_backend.kernels.launch import (
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    let_next_start,
    needs_twin,
    next_power_of_2,
    tl,
)
from cb_backend.kernels.route import LEAST_SUM, Routing, choosable, route, route_torch

BLOCK_M = 16  # rows of a block: no fewer than rows of a step in one launch
# NOTE: of 8 rows with 4 experts each, the plan that this kernel made on an H200 (Triton 3.6) was wrong, and what it
# named was not there; the interpreter makes it right. A single row's is right on both.
MAX_ROWS = 1


@jit("num_tokens")
def _route_few_kernel(
    logits_ptr,
    slot_mapping_ptr,
    weights_ptr,
    pairs_ptr,
    experts_ptr,
    num_blocks_ptr,
    parts_ptr,
    num_tokens,
    logits_stride,
    part_size,  # elements of a token's parts
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,  # of all logits; else of the chosen ones
    RENORMALISE: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    BOUND: tl.constexpr,  # blocks of the plan
    IS_DEPENDENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # rows of all blocks, rounded up
    BLOCK_PART: tl.constexpr,
):
    """All rows in one program."""
    let_next_start(IS_DEPENDENT)
    token, expert, rank = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    is_token, is_expert = token < num_tokens, expert < NUM_EXPERTS
    is_real = tl.load(slot_mapping_ptr + token, mask=is_token, other=0) != 0  # older than the step's first layer
    await_previous(IS_DEPENDENT)
    logit_ptr = logits_ptr + token.to(tl.int64)[:, None] * logits_stride + expert[None, :]
    logits = tl.load(logit_ptr, mask=is_token[:, None] & is_expert[None, :], other=float("-inf")).to(tl.float32)
    choice = tl.where(is_expert[None, :], choosable(logits), float("-inf"))
    ids = tl.full([BLOCK_T, BLOCK_K], NUM_EXPERTS, tl.int32)
    chosen = tl.full([BLOCK_T, BLOCK_K], float("-inf"), tl.float32)
    for each in tl.static_range(TOP_K):
        best = tl.max(choice, axis=1)
        found = tl.min(tl.where(choice == best[:, None], expert[None, :], NUM_EXPERTS), axis=1)
        is_found = expert[None, :] == found[:, None]
        value = tl.sum(tl.where(is_found, logits, 0.0), axis=1)
        ids = tl.where(rank[None, :] == each, found[:, None], ids)
        chosen = tl.where(rank[None, :] == each, value[:, None], chosen)
        choice = tl.where(is_found, float("-inf"), choice)
    weights = tl.exp(chosen - tl.max(chosen, axis=1)[:, None])
    if IS_SOFTMAX:
        total = tl.sum(tl.exp(logits - tl.max(logits, axis=1)[:, None]), axis=1)
        weights = weights / total[:, None]
    else:
        weights = weights / tl.sum(weights, axis=1)[:, None]
    if RENORMALISE:
        weights = weights / (tl.sum(weights, axis=1) + LEAST_SUM)[:, None]
    ids = tl.where(is_real[:, None], ids, NUM_EXPERTS)
    is_pair = is_token[:, None] & (rank < TOP_K)[None, :]
    pair = token[:, None] * TOP_K + rank[None, :]
    tl.store(weights_ptr + pair, tl.where(is_real[:, None], weights * scale, 0.0), mask=is_pair)
    for row in range(0, num_tokens):
        if tl.load(slot_mapping_ptr + row) == 0:  # nobody else writes the parts of padding
            for start in range(0, part_size, BLOCK_PART):
                column = start + tl.arange(0, BLOCK_PART)
                nothing = tl.zeros([BLOCK_PART], parts_ptr.dtype.element_ty)
                tl.store(parts_ptr + row * part_size + column, nothing, mask=column < part_size)
    # A token has an expert once, so an expert has no more pairs than there are tokens: one block.
    row = tl.arange(0, BLOCK_ROWS)
    tl.store(pairs_ptr + row, tl.zeros_like(row) + num_tokens * TOP_K, mask=row < BOUND * BLOCK_M)
    tl.debug_barrier()
    flat, pair = tl.reshape(ids, [BLOCK_T * BLOCK_K]), tl.reshape(pair, [BLOCK_T * BLOCK_K])
    place = tl.arange(0, BLOCK_T * BLOCK_K)
    is_before = place[None, :] < place[:, None]
    is_same = flat[None, :] == flat[:, None]
    place_in_block = tl.sum((is_same & is_before).to(tl.int32), axis=1)
    is_routed = flat < NUM_EXPERTS
    is_first = is_routed & (place_in_block == 0)
    # Blocks before a pair's: of lower experts, by the first pair of each. The transpose is by comparison with itself.
    others_before = tl.sum((is_same & (place[None, :] > place[:, None])).to(tl.int32), axis=0)
    is_first_there = (others_before == 0) & (flat < NUM_EXPERTS)
    block = tl.sum((is_first_there[None, :] & (flat[None, :] < flat[:, None])).to(tl.int32), axis=1)
    tl.store(pairs_ptr + block * BLOCK_M + place_in_block, pair, mask=is_routed)
    tl.store(experts_ptr + block, flat, mask=is_first)
    tl.store(num_blocks_ptr, tl.sum(is_first.to(tl.int32), axis=0))


def route_experts(
    logits: Tensor,
    slot_mapping: Tensor,
    parts: Tensor,
    routing: Routing,
    score_bias: Tensor | None = None,
    bits: int = 16,
) -> tuple[Tensor, ExpertPlan]:
    """`route_experts_torch` in one launch or two."""
    if needs_twin(logits):
        return route_experts_torch(logits, slot_mapping, parts, routing, score_bias, bits)
    num_tokens, num_experts = logits.shape
    is_few = 0 < num_tokens <= MAX_ROWS and routing.num_here is None
    if is_few and routing.scoring != "sigmoid" and score_bias is None and routing.num_groups == 1:
        return _route_few(logits, slot_mapping, parts, routing)
    ids, weights = route(logits, slot_mapping, parts, routing, score_bias)
    return weights, plan_experts(ids, num_experts, bits, routing.num_here)


def _route_few(logits: Tensor, slot_mapping: Tensor, parts: Tensor, routing: Routing) -> tuple[Tensor, ExpertPlan]:
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    plan = new_plan(num_tokens * routing.top_k, num_experts, BLOCK_M, logits.device)
    _route_few_kernel[(1,)](
        logits, slot_mapping, weights, *plan[:3], parts,
        num_tokens, logits.stride(0), parts.stride(0), routing.scale,
        NUM_EXPERTS=num_experts, TOP_K=routing.top_k, IS_SOFTMAX=routing.scoring == "softmax",
        RENORMALISE=routing.renormalise, LEAST_SUM=LEAST_SUM, BOUND=plan.bound,
        IS_DEPENDENT=can_overlap(logits.device), BLOCK_M=BLOCK_M, BLOCK_T=next_power_of_2(num_tokens),
        BLOCK_E=next_power_of_2(num_experts), BLOCK_K=next_power_of_2(routing.top_k),
        BLOCK_ROWS=next_power_of_2(plan.bound * BLOCK_M), BLOCK_PART=1024,
        num_warps=1, **dependent_options(logits.device, num_tokens),  # a warp finds the largest without a barrier
    )  # fmt: skip
    return weights, plan


def route_experts_torch(
    logits: Tensor,
    slot_mapping: Tensor,
    parts: Tensor,
    routing: Routing,
    score_bias: Tensor | None = None,
    bits: int = 16,
) -> tuple[Tensor, ExpertPlan]:
    """`route_torch`, and `plan_experts_torch` of what it gives: (weights [num_tokens, top_k] float32, the plan)."""
    ids, weights = route_torch(logits, slot_mapping, parts, routing, score_bias)
    return weights, plan_experts_torch(ids, logits.shape[1], bits, routing.num_here)
