"""The work list of one layer's experts: which rows each of them gets, in blocks of a fixed number of rows.

Made on the device from the routing, so that a captured graph serves any; the number of blocks is bounded by the shape
alone. There are no atomics and no sort: a program an expert counts all pairs and lists its own in their order, so the
same routing gives the same list. Knows ids, not what is computed from the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cb_backend.kernels.launch import (
    await_previous,
    can_overlap,
    dependent_options,
    jit,
    launch_parameters,
    let_next_start,
    needs_twin,
    next_power_of_2,
    tl,
)

TWIN_BLOCK_M = 16


class ExpertPlan(NamedTuple):
    """A pair is a token and one of its experts: pair p is token p // top_k."""

    pairs: Tensor  # int32 [bound * block_m]: of each row of each block; num_pairs where there is none
    experts: Tensor  # int32 [bound]: of each block
    num_blocks: Tensor  # int32 [1]: those in use, the first ones
    num_pairs: int  # those of all experts, whether or not they are here
    num_experts: int  # that there are, here or elsewhere: with the pairs, how many rows an expert has
    block_m: int

    @property
    def bound(self) -> int:
        """No routing needs more blocks."""
        return self.experts.shape[0]

    def by_expert(self) -> Iterator[tuple[int, Tensor]]:
        """(expert, its pairs int64), of those that have any. Waits for the device."""
        num_blocks = int(self.num_blocks)
        experts = self.experts[:num_blocks].tolist()
        rows = self.pairs.view(-1, self.block_m)
        first = 0
        while first < num_blocks:
            end = first
            while end < num_blocks and experts[end] == experts[first]:
                end += 1
            pairs = rows[first:end].flatten().long()
            yield experts[first], pairs[pairs < self.num_pairs]
            first = end


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """A block for every expert that is hit, and one more for every `block_m` pairs."""
    return min(num_pairs, num_experts) + num_pairs // block_m


@jit("num_pairs")
def _plan_experts_kernel(
    ids_ptr,
    pairs_ptr,
    experts_ptr,
    num_blocks_ptr,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,  # more than NUM_EXPERTS: the last is of those that go nowhere
    CHUNK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """The blocks of one expert a program."""
    let_next_start(IS_DEPENDENT)
    await_previous(IS_DEPENDENT)
    own, expert, index = tl.program_id(0), tl.arange(0, BLOCK_E), tl.arange(0, CHUNK)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        ids = tl.load(ids_ptr + start + index, mask=start + index < num_pairs, other=NUM_EXPERTS)
        counts += tl.histogram(ids, BLOCK_E).to(tl.int32)
    blocks = tl.where(expert < NUM_EXPERTS, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(expert < own, blocks, 0), axis=0)
    num_own = tl.sum(tl.where(expert == own, blocks, 0), axis=0)
    if own == 0:
        tl.store(num_blocks_ptr, tl.sum(blocks, axis=0))
    if num_own == 0:
        return
    done = 0
    for start in range(0, num_pairs, CHUNK):
        pair = start + index
        ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=NUM_EXPERTS)
        is_own = ids == own
        place = tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(pairs_ptr + first * BLOCK_M + done + place, pair, mask=is_own)
        done += tl.sum(is_own.to(tl.int32), axis=0)
    row = tl.arange(0, BLOCK_M)
    last_ptr = pairs_ptr + (first + num_own - 1) * BLOCK_M + row
    tl.store(last_ptr, tl.zeros_like(row) + num_pairs, mask=(num_own - 1) * BLOCK_M + row >= done)
    for block in range(0, num_own):
        tl.store(experts_ptr + first + block, own)


def plan_experts(ids: Tensor, num_experts: int, bits: int = 16, num_here: int | None = None) -> ExpertPlan:
    """`plan_experts_torch` in one launch; rows of a block as the tuned table says for so many pairs an expert."""
    if needs_twin(ids):
        return plan_experts_torch(ids, num_experts, bits, num_here)
    num_pairs, device = ids.numel(), ids.device
    share = next_power_of_2(-(-num_pairs // num_experts))
    parameters = launch_parameters("plan_experts", device, e=num_experts, m=share, bits=bits)
    block_m = parameters["block_m"]
    num_here = num_experts if num_here is None else num_here
    plan = new_plan(num_pairs, num_experts, block_m, device, num_here)
    chunk = min(max(next_power_of_2(num_pairs), 16), 1024)
    _plan_experts_kernel[(num_here,)](
        ids, *plan[:3], num_pairs,
        NUM_EXPERTS=num_here, BLOCK_M=block_m, BLOCK_E=next_power_of_2(num_here + 1), CHUNK=chunk,
        IS_DEPENDENT=can_overlap(device), num_warps=4, **dependent_options(device, ids.shape[0]),
    )  # fmt: skip
    return plan


def new_plan(
    num_pairs: int, num_experts: int, block_m: int, device: torch.device, num_here: int | None = None
) -> ExpertPlan:
    bound = max_blocks(num_pairs, num_experts if num_here is None else num_here, block_m)
    pairs, experts, num_blocks = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (bound * block_m, bound, 1)
    )
    return ExpertPlan(pairs, experts, num_blocks, num_pairs, num_experts, block_m)


def plan_experts_torch(ids: Tensor, num_experts: int, bits: int = 16, num_here: int | None = None) -> ExpertPlan:
    """Blocks of pairs of one expert each, experts in ascending order, an expert's pairs in theirs.

    ids [num_tokens, top_k] int32, from 0 to num_here, which goes nowhere; `route` gives no others, and none may be
    given: on a GPU the kernel's histogram would count them as other experts'. num_here: experts of this device, of
    `num_experts` that tokens go to; None: it has all. bits: of the experts' weights, for the kernels' choice of a
    block's rows. What lies past the blocks in use is not to be looked at.
    """
    flat, num_here = ids.flatten(), num_experts if num_here is None else num_here
    plan = new_plan(flat.numel(), num_experts, TWIN_BLOCK_M, ids.device, num_here)
    block = 0
    for expert in flat.unique().tolist():
        if not 0 <= expert < num_here:
            continue
        own = (flat == expert).nonzero().flatten().int()
        count = -(-len(own) // TWIN_BLOCK_M)
        rows = plan.pairs[block * TWIN_BLOCK_M : (block + count) * TWIN_BLOCK_M]
        rows.fill_(plan.num_pairs)
        rows[: len(own)] = own
        plan.experts[block : block + count] = expert
        block += count
    plan.num_blocks.fill_(block)
    return plan
