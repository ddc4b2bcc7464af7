"""The work list of one step's adapters: which tokens go through which, in items of a fixed number of rows.

Made on the device from the slots, so that a captured graph serves any mix, and once a step: every layer uses it. The
number of items is bounded by the shape alone. There are no atomics and no sort: a program an adapter counts all tokens
and lists its own in their order, so the same slots give the same list. Tokens without an adapter are listed likewise,
behind the others, for kernels that have something to do for every token. Knows slots, not what is computed from the
list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cb_backend.kernels.launch import jit, launch_parameters, needs_twin, next_power_of_2, tl

# int32 values an item: adapter, or -1 for none; the first of its rows in the list; number of rows; one that fills it up
ITEM = 4
_FEW_TOKENS, _MOST_AT_ONCE = 256, 1024  # tokens that a program looks at together
_MOST_TOLD_APART = 8192  # tokens: steps of more have the tiles of so many
TWIN_TILE_ROWS = 16


class AdapterPlan(NamedTuple):
    """What lies past the items in use is not to be looked at."""

    rows: Tensor  # int32 [num_tokens]: all tokens, adapter by adapter, then those without any; each's in their order
    items: Tensor  # int32 [bound_of_all, ITEM]: those of adapters, then those of tokens without any
    counts: Tensor  # int32 [2]: items of adapters; all items in use, which are the first ones
    max_adapters: int
    tile_rows: int  # an item has at most so many

    @property
    def bound(self) -> int:
        """No mix needs more items of adapters."""
        return max_items(self.rows.shape[0], self.max_adapters, self.tile_rows)

    @property
    def bound_of_all(self) -> int:
        """No mix needs more items, with those of tokens without an adapter."""
        return self.items.shape[0]

    def by_item(self) -> Iterator[tuple[int, slice]]:
        """(adapter, its rows in the list), of the items of adapters. Waits for the device."""
        for adapter, first, count, _ in self.items[: int(self.counts[0])].tolist():
            yield adapter, slice(first, first + count)


def max_items(num_tokens: int, max_kinds: int, tile_rows: int) -> int:
    """An item for every kind that there is among the tokens (an adapter, or none), one more for every `tile_rows`."""
    return min(num_tokens, max_kinds) + num_tokens // tile_rows


def new_plan(num_tokens: int, max_adapters: int, tile_rows: int, device: torch.device) -> AdapterPlan:
    bound = max_items(num_tokens, max_adapters + 1, tile_rows)
    rows, items, counts = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (num_tokens, (bound, ITEM), 2)
    )
    return AdapterPlan(rows, items, counts, max_adapters, tile_rows)


@jit()
def item_at(item_ptr):
    """An item's adapter (int64: it is multiplied by an adapter's size), its first row in the list, its rows' number."""
    return tl.load(item_ptr).to(tl.int64), tl.load(item_ptr + 1), tl.load(item_ptr + 2)


@jit()
def _adapters_of(
    token,
    slots_ptr,
    prompt_slots_ptr,
    query_start_loc_ptr,
    adapter_of_slot_ptr,
    num_tokens,
    num_decode,
    num_prompts,
    num_halvings,
    MAX_ADAPTERS: tl.constexpr,
    HAS_PROMPTS: tl.constexpr,
):
    """The tokens' adapters; MAX_ADAPTERS where a token has none, or is none."""
    is_token = token < num_decode
    slot = tl.load(slots_ptr + token, mask=is_token, other=0)
    if HAS_PROMPTS:
        # How many prompts end at or before the token: nothing is compiled for their number.
        own = token * 0
        for halving in range(num_halvings):
            further = own + (1 << (num_halvings - 1 - halving))
            end = tl.load(query_start_loc_ptr + further, mask=further <= num_prompts, other=0x7FFFFFFF)
            own = tl.where(end <= token - num_decode, further, own)
        is_prompt = (token >= num_decode) & (token < num_tokens) & (own < num_prompts)
        slot = tl.where(is_prompt, tl.load(prompt_slots_ptr + own, mask=is_prompt, other=0), slot)
        is_token = is_token | is_prompt
    adapter = tl.load(adapter_of_slot_ptr + slot, mask=is_token, other=-1)
    return tl.where((adapter >= 0) & (adapter < MAX_ADAPTERS), adapter, MAX_ADAPTERS)


@jit("num_tokens", "num_decode", "num_prompts", "num_halvings")
def _plan_adapters_kernel(
    slots_ptr,
    prompt_slots_ptr,
    query_start_loc_ptr,
    adapter_of_slot_ptr,
    rows_ptr,
    items_ptr,
    counts_ptr,
    num_tokens,
    num_decode,
    num_prompts,
    num_halvings,  # that tell so many prompts apart
    MAX_ADAPTERS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK_A: tl.constexpr,  # more than MAX_ADAPTERS: the last is of tokens that have none
    HAS_PROMPTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The items of one adapter a program; of tokens without any the last one."""
    own, adapter, index = tl.program_id(0), tl.arange(0, BLOCK_A), tl.arange(0, CHUNK)
    counts = tl.zeros([BLOCK_A], tl.int32)
    for start in range(0, num_tokens, CHUNK):
        ids = _adapters_of(
            start + index, slots_ptr, prompt_slots_ptr, query_start_loc_ptr, adapter_of_slot_ptr,
            num_tokens, num_decode, num_prompts, num_halvings, MAX_ADAPTERS, HAS_PROMPTS,
        )  # fmt: skip
        counts += tl.histogram(ids, BLOCK_A).to(tl.int32)
    # Up to here what is no token counts as one without an adapter.
    is_adapter = adapter < MAX_ADAPTERS
    num_adapted = tl.sum(tl.where(is_adapter, counts, 0), axis=0)
    counts = tl.where(adapter == MAX_ADAPTERS, num_tokens - num_adapted, counts)
    items_of = (counts + TILE_ROWS - 1) // TILE_ROWS
    if own == 0:
        tl.store(counts_ptr, tl.sum(tl.where(is_adapter, items_of, 0), axis=0))
        tl.store(counts_ptr + 1, tl.sum(items_of, axis=0))
    num_own = tl.sum(tl.where(adapter == own, counts, 0), axis=0)
    if num_own == 0:
        return
    first_row = tl.sum(tl.where(adapter < own, counts, 0), axis=0)
    item_ptr = items_ptr + tl.sum(tl.where(adapter < own, items_of, 0), axis=0) * ITEM
    for done in range(0, num_own, TILE_ROWS):
        tl.store(item_ptr, tl.where(own < MAX_ADAPTERS, own, -1))
        tl.store(item_ptr + 1, first_row + done)
        tl.store(item_ptr + 2, tl.minimum(num_own - done, TILE_ROWS))
        tl.store(item_ptr + 3, 0)
        item_ptr += ITEM
    row_ptr = rows_ptr + first_row
    for start in range(0, num_tokens, CHUNK):
        ids = _adapters_of(
            start + index, slots_ptr, prompt_slots_ptr, query_start_loc_ptr, adapter_of_slot_ptr,
            num_tokens, num_decode, num_prompts, num_halvings, MAX_ADAPTERS, HAS_PROMPTS,
        )  # fmt: skip
        is_own = ((ids == own) & (start + index < num_tokens)).to(tl.int32)
        tl.store(row_ptr + tl.cumsum(is_own, axis=0) - 1, start + index, mask=is_own > 0)
        row_ptr += tl.sum(is_own, axis=0)


def plan_adapters(
    slots: Tensor,
    num_decode: int,
    prompt_slots: Tensor,
    query_start_loc: Tensor,
    num_prefill: int,
    adapter_of_slot: Tensor,
    max_adapters: int,
) -> AdapterPlan:
    """`plan_adapters_torch` in one plain launch; rows of an item as the tuned table says for so many tokens."""
    if needs_twin(slots):
        return plan_adapters_torch(
            slots, num_decode, prompt_slots, query_start_loc, num_prefill, adapter_of_slot, max_adapters
        )
    num_tokens, device = num_decode + num_prefill, slots.device
    size = min(next_power_of_2(num_tokens), _MOST_TOLD_APART)
    tile_rows = launch_parameters("lora_plan", device, m=size)["tile_rows"]
    plan = new_plan(num_tokens, max_adapters, tile_rows, device)
    num_prompts = prompt_slots.shape[0] if num_prefill else 0
    chunk = _chunk_of(num_tokens, num_prompts > 0)
    # NOTE: no dependent launch: what it reads was written by plain ones, and what reads it need not wait for it.
    _plan_adapters_kernel[(max_adapters + 1,)](
        slots, prompt_slots, query_start_loc, adapter_of_slot, *plan[:3], num_tokens, num_decode, num_prompts,
        num_prompts.bit_length(), MAX_ADAPTERS=max_adapters, TILE_ROWS=tile_rows, ITEM=ITEM,
        BLOCK_A=next_power_of_2(max_adapters + 1),
        HAS_PROMPTS=num_prompts > 0, CHUNK=chunk, num_warps=8,
    )  # fmt: skip
    return plan


def _chunk_of(num_tokens: int, has_prompts: bool) -> int:
    """Beside prompts, of which steps may have any number of tokens, one of two."""
    if has_prompts:
        return _FEW_TOKENS if num_tokens <= _FEW_TOKENS else _MOST_AT_ONCE
    return max(16, min(next_power_of_2(num_tokens), _MOST_AT_ONCE))


def plan_adapters_torch(
    slots: Tensor,
    num_decode: int,
    prompt_slots: Tensor,
    query_start_loc: Tensor,
    num_prefill: int,
    adapter_of_slot: Tensor,
    max_adapters: int,
) -> AdapterPlan:
    """Items of tokens of one adapter each, adapters in ascending order, then items of tokens without one; the tokens of
    each in theirs.

    A step's tokens are one of each of the first `num_decode` slots (int32 [at least num_decode]), then `num_prefill`
    tokens of prompts: prompt i, of slot prompt_slots[i], has those from query_start_loc[i] to query_start_loc[i + 1]
    (int32 [num_prompts], [num_prompts + 1]); what is past the last is padding. adapter_of_slot: int32 [num_slots]; what
    is not in [0, max_adapters) is no adapter.
    """
    num_tokens = num_decode + num_prefill
    token_slots = slots[:num_decode].long()
    if num_prefill:
        token = torch.arange(num_prefill, device=slots.device)
        place = torch.searchsorted(query_start_loc[1:].long().contiguous(), token, right=True)
        # Behind the last prompt there is a slot that does not exist.
        token_slots = torch.cat((token_slots, torch.nn.functional.pad(prompt_slots.long(), (0, 1), value=-1)[place]))
    adapters = torch.nn.functional.pad(adapter_of_slot, (0, 1), value=-1)[token_slots]
    plan = new_plan(num_tokens, max_adapters, TWIN_TILE_ROWS, slots.device)
    items: list[tuple[int, ...]] = []
    first = 0
    adapters = torch.where((adapters >= 0) & (adapters < max_adapters), adapters, max_adapters)
    for adapter in sorted({*adapters.tolist()}):
        own = (adapters == adapter).nonzero().flatten()
        plan.rows[first : first + len(own)] = own.int()
        name = adapter if adapter < max_adapters else -1
        tiles = range(0, len(own), TWIN_TILE_ROWS)
        items += [(name, first + done, min(len(own) - done, TWIN_TILE_ROWS), 0) for done in tiles]
        first += len(own)
    for index, item in enumerate(items):
        plan.items[index] = torch.tensor(item, dtype=torch.int32, device=slots.device)
    plan.counts[0], plan.counts[1] = sum(adapter >= 0 for adapter, *_ in items), len(items)
    return plan
