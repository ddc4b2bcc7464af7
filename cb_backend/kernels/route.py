"""Which experts a token goes to, and how much each of them counts: the best `top_k` of a router's logits, row by row.

Rows of padding go nowhere, so that a step in a captured graph reads the weights of the experts that its real rows hit.
Where several devices have whole experts each, all choose alike, and what goes to others' experts goes nowhere here.
Knows logits, not the router or the experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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

LEAST_SUM = 1e-20  # added to what weights are divided by: sigmoids may all be next to nothing


class Routing(NamedTuple):
    """How experts are chosen and weighed."""

    top_k: int
    scoring: str = "softmax"  # softmax | softmax_of_top_k | sigmoid
    renormalise: bool = False  # the chosen ones' weights to a sum of 1, before the scale
    scale: float = 1.0  # of the weights
    num_groups: int = 1  # of neighbouring experts; a group's rank is the sum of its two best
    top_groups: int = 1  # those whose experts may be chosen
    first_here: int = 0  # the experts that this device has: `num_here` from this one on
    num_here: int | None = None  # None: it has all


@jit()
def choosable(choice):
    """Above -inf, which marks what is chosen already: so an expert is chosen once, whatever a row's numbers are."""
    return tl.maximum(tl.where(choice == choice, choice, -1.0e38), -1.0e38)


@jit()
def _best(choice, expert, num_experts):
    """(the largest, the first expert that has it)"""
    best = tl.max(choice, axis=0)
    found = tl.min(tl.where(choice == best, expert, num_experts), axis=0)
    return best, found


@jit()
def _within_groups(
    choice, expert, num_experts: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr
):  # fmt: skip
    """The scores, -inf where an expert's group is not among the best."""
    group = expert // (num_experts // NUM_GROUPS)
    rank = tl.full(choice.shape, float("-inf"), tl.float32)
    for each in tl.static_range(NUM_GROUPS):
        inside = tl.where(group == each, choice, float("-inf"))
        first, found = _best(inside, expert, num_experts)
        second, _ = _best(tl.where(expert == found, float("-inf"), inside), expert, num_experts)
        rank = tl.where(group == each, first + second, rank)
    kept = tl.full(choice.shape, float("-inf"), tl.float32)
    for _ in tl.static_range(TOP_GROUPS):
        _, found = _best(rank, expert, num_experts)
        is_best = group == found // (num_experts // NUM_GROUPS)
        kept = tl.where(is_best, choice, kept)
        rank = tl.where(is_best, float("-inf"), rank)
    return kept


@jit("first_here")  # of which no value is worth a variant: each rank has another
def _route_kernel(
    logits_ptr,
    slot_mapping_ptr,
    score_bias_ptr,
    ids_ptr,
    weights_ptr,
    parts_ptr,
    logits_stride,
    part_size,  # elements of a token's parts
    hidden_size,  # of one of them; None where all experts are here
    first_here,  # the same
    scale,
    NUM_EXPERTS: tl.constexpr,
    NUM_HERE: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PART: tl.constexpr,
):
    """One row a program."""
    let_next_start(IS_DEPENDENT)
    row = tl.program_id(0)
    expert, rank = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    is_expert = expert < NUM_EXPERTS
    is_padding = tl.load(slot_mapping_ptr + row) == 0  # older than the step's first layer
    if HAS_BIAS:
        score_bias = tl.load(score_bias_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)
    await_previous(IS_DEPENDENT)
    out = row * TOP_K + rank
    if is_padding:
        tl.store(ids_ptr + out, tl.full([BLOCK_K], NUM_HERE, tl.int32), mask=rank < TOP_K)
        tl.store(weights_ptr + out, tl.zeros([BLOCK_K], tl.float32), mask=rank < TOP_K)
        # Nobody else writes them.
        part_row_ptr = parts_ptr + row.to(tl.int64) * part_size
        nothing = tl.zeros([BLOCK_PART], parts_ptr.dtype.element_ty)
        for start in range(0, part_size, BLOCK_PART):
            column = start + tl.arange(0, BLOCK_PART)
            tl.store(part_row_ptr + column, nothing, mask=column < part_size)
        return
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + expert, mask=is_expert, other=float("-inf"))
    score = logits.to(tl.float32)
    choice = score
    if SCORING == "softmax":
        score = tl.exp(score - tl.max(score, axis=0))
        score = score / tl.sum(score, axis=0)
    elif SCORING == "sigmoid":
        score = tl.sigmoid(score)
        choice = score
    if HAS_BIAS:
        choice += score_bias
    choice = tl.where(is_expert, choosable(choice), float("-inf"))
    if NUM_GROUPS > 1:
        choice = _within_groups(choice, expert, NUM_EXPERTS, NUM_GROUPS, TOP_GROUPS)
    ids = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.full([BLOCK_K], float("-inf") if SCORING == "softmax_of_top_k" else 0.0, tl.float32)
    for each in tl.static_range(TOP_K):
        _, found = _best(choice, expert, NUM_EXPERTS)
        weight = tl.sum(tl.where(expert == found, score, 0.0), axis=0)
        ids = tl.where(rank == each, found, ids)
        weights = tl.where(rank == each, weight, weights)
        choice = tl.where(expert == found, float("-inf"), choice)
    if SCORING == "softmax_of_top_k":
        weights = tl.exp(weights - tl.max(weights, axis=0))
        weights = weights / tl.sum(weights, axis=0)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, axis=0) + LEAST_SUM)
    if NUM_HERE < NUM_EXPERTS:
        is_here = (ids >= first_here) & (ids < first_here + NUM_HERE)
        ids = tl.where(is_here, ids - first_here, NUM_HERE)
        for each in tl.static_range(TOP_K):
            if tl.sum(tl.where(rank == each, ids, 0), axis=0) == NUM_HERE:  # nobody here writes this part
                part_ptr = parts_ptr + row.to(tl.int64) * part_size + each * hidden_size
                for start in range(0, hidden_size, BLOCK_PART):
                    column = start + tl.arange(0, BLOCK_PART)
                    nothing = tl.zeros([BLOCK_PART], parts_ptr.dtype.element_ty)
                    tl.store(part_ptr + column, nothing, mask=column < hidden_size)
    tl.store(ids_ptr + out, ids, mask=rank < TOP_K)
    tl.store(weights_ptr + out, weights * scale, mask=rank < TOP_K)


def route(
    logits: Tensor, slot_mapping: Tensor, parts: Tensor, routing: Routing, score_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`route_torch` in one launch; rows of logits may be strided, parts are contiguous."""
    if needs_twin(logits):
        return route_torch(logits, slot_mapping, parts, routing, score_bias)
    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return ids, weights
    block, num_here = next_power_of_2(num_experts), routing.num_here
    has_all = num_here is None
    _route_kernel[(num_tokens,)](
        logits, slot_mapping, score_bias, ids, weights, parts, logits.stride(0), parts.stride(0),
        None if has_all else parts.stride(1), None if has_all else routing.first_here, routing.scale,
        NUM_EXPERTS=num_experts, NUM_HERE=num_experts if has_all else num_here, TOP_K=routing.top_k,
        SCORING=routing.scoring, RENORMALISE=routing.renormalise, NUM_GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups, HAS_BIAS=score_bias is not None, LEAST_SUM=LEAST_SUM,
        IS_DEPENDENT=can_overlap(logits.device), BLOCK=block, BLOCK_K=next_power_of_2(routing.top_k), BLOCK_PART=1024,
        num_warps=1 if block <= 256 else 4, **dependent_options(logits.device, num_tokens),
    )  # fmt: skip
    return ids, weights


def route_torch(
    logits: Tensor, slot_mapping: Tensor, parts: Tensor, routing: Routing, score_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and their weights: ids [num_tokens, top_k] int32, weights float32.

    logits [num_tokens, num_experts] of any float type; scores are float32. `softmax`: of all logits, then the chosen
    ones'; `softmax_of_top_k`: of the chosen logits; `sigmoid`: of each. score_bias [num_experts], of sigmoids, helps to
    choose and does not weigh. Equal scores: the lower id. slot_mapping [num_tokens] int32: 0 is a row of padding; its
    ids are num_experts, which is no expert, its weights 0, and its parts [num_tokens, num_parts, hidden_size], which no
    product will write, become 0.

    Where `num_here` of the experts are here, ids are counted from `first_here`, and are num_here for the others and for
    padding; the parts of others' pairs become 0 too. Weights are those of one device.
    """
    num_tokens, num_experts = logits.shape
    score = logits.float()
    choice = score
    if routing.scoring == "softmax":
        score = torch.softmax(score, dim=-1)
    elif routing.scoring == "sigmoid":
        choice = score = torch.sigmoid(score)
    if score_bias is not None:
        choice = choice + score_bias.float()
    if routing.num_groups > 1:
        grouped = choice.view(num_tokens, routing.num_groups, -1)
        rank = grouped.topk(min(2, grouped.shape[2]), dim=-1)[0].sum(-1)
        best = rank.sort(dim=-1, descending=True, stable=True)[1][:, : routing.top_groups]
        is_best = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~is_best.unsqueeze(-1), float("-inf")).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True)[1][:, : routing.top_k]
    weights = score.gather(1, ids)
    if routing.scoring == "softmax_of_top_k":
        weights = torch.softmax(weights, dim=-1)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    is_padding, nowhere = (slot_mapping == 0).unsqueeze(1), num_experts
    parts.masked_fill_(is_padding.unsqueeze(2), 0)
    if routing.num_here is not None:
        ids, nowhere = ids - routing.first_here, routing.num_here
        is_elsewhere = (ids < 0) | (ids >= nowhere)
        ids.masked_fill_(is_elsewhere, nowhere)
        parts[:, : routing.top_k].masked_fill_(is_elsewhere.unsqueeze(2), 0)
    return ids.int().masked_fill_(is_padding, nowhere), (weights * routing.scale).masked_fill_(is_padding, 0)
