"""Block tables of models some of whose layers see a window only: blocks go back when they have fallen out of it.

The groups of layers share one pool: a block is as large for each (`layout`), so the scheduler goes on counting blocks.
A request's block table is a list of rows, one block of each group for every `block_size` tokens (`block_needs`). In
groups with windows a prompt's blocks are taken as it is computed, step by step; until then they are promised
(`promises`), so that a prompt that has begun can always go on.

What falls out of a window stays findable until its space is needed. A prefix is found only as far as everything is
there that is read after it (`group_prefix`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.request import Request
from cb_backend.kv_cache.block_needs import BlockNeeds
from cb_backend.kv_cache.block_pool import NULL_BLOCK, CachedBlock, HashBlock
from cb_backend.kv_cache.group_prefix import GroupPrefix, group_digest
from cb_backend.kv_cache.manager import Chain, KVCacheManager
from cb_backend.kv_cache.promises import Promises
from cb_backend.support.fault_points import reach


@dataclass(slots=True)
class _Windows:
    """A request's blocks in the groups with windows."""

    first: dict[int, int]  # by group: the first row that has a block
    end: int  # rows before it have, or had, their blocks; those from it on are still to be taken
    # By group, as long as rows are to be taken: the blocks that nobody else held when the request came to hold them.
    num_own: dict[int, int] = field(default_factory=dict)
    given_back: list[CachedBlock] = field(default_factory=list)  # content of the prompt that others may want


class GroupedKVCacheManager(KVCacheManager):
    """A `KVCacheManager` of several groups, or of one that has a window."""

    def __init__(
        self,
        num_blocks: int,
        needs: BlockNeeds,
        enable_prefix_caching: bool = True,
        hash_block: HashBlock | None = None,
    ) -> None:
        super().__init__(num_blocks, needs.block_size, enable_prefix_caching, hash_block)
        self.needs = needs
        self.num_groups = needs.num_groups
        self.minds_full_blocks = True
        self._windows: dict[int, _Windows] = {}  # by request id, of the requests that hold blocks
        self._promises = Promises(self.pool)

    # ---- how much -------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """What is promised is not free any more."""
        return self.pool.num_free_blocks - self._promises.num_blocks

    @property
    def num_free_rows(self) -> int:
        return self.num_free_blocks // self.num_groups

    @property
    def num_free_tokens(self) -> int:
        return self.num_free_rows * self.block_size

    @property
    def most_tokens(self) -> int:
        return self.needs.most_tokens(self.num_usable_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        return self.needs.num_blocks_for(num_tokens)

    def num_blocks_held(self, num_tokens: NDArray[np.int32]) -> int:
        return sum(self.needs.num_blocks_for(tokens) for tokens in num_tokens.tolist())

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        found, _ = self.get_computed_blocks(request)
        return max(0, self.num_blocks_for(num_tokens) - len(found) + found.count(NULL_BLOCK))

    def growth(self, held: NDArray[np.float64], to_come: NDArray[np.float64], most_at_once: float) -> int:
        return self.needs.growth(held, to_come, most_at_once)

    def kept(self, block_table: Sequence[int], num_tokens: int) -> Sequence[int]:
        return self.needs.kept(block_table, num_tokens)

    # ---- prefixes -------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        """As `KVCacheManager` has it, in rows; the null block stands where nothing is read any more.

        Nothing is touched before all of it is known to be there.
        """
        prefix = GroupPrefix(self.pool, self.needs, self._cached_chain(request))
        num_rows = prefix.longest_usable()
        return prefix.table(num_rows), num_rows * self.block_size

    def cache_full_blocks(self, request: Request, token_ids: NDArray[np.int32], num_computed_tokens: int) -> None:
        """As `KVCacheManager` has it, and give back what has fallen out of the windows of all tokens to come."""
        if self.enable_prefix_caching:
            reach("kv.cache_full_blocks")
            self._cache_rows(request, token_ids, num_computed_tokens // self.block_size)
        self.give_back(request, num_computed_tokens)

    def _cache_rows(self, request: Request, token_ids: NDArray[np.int32], num_rows: int) -> None:
        pool, chain = self.pool, self._chains[request.request_id]
        end = chain.end
        if isinstance(end, CachedBlock) and not end.is_live:
            end, chain.num_blocks = request.cache_salt, 0  # as in `KVCacheManager`
        if chain.is_closed:
            return
        contents = self._contents(token_ids, chain.num_blocks, num_rows)
        for index, token_bytes in enumerate(contents, chain.num_blocks):
            digest = self._digest(request, index, token_bytes)
            row = request.block_table[index * self.num_groups : (index + 1) * self.num_groups]
            if row[0] == NULL_BLOCK:  # given back, or never there: nothing can hang on it
                chain.is_closed = True
                return
            for group in range(1, self.num_groups):
                own = group_digest(digest, group)
                if row[group] != NULL_BLOCK and pool.find(own, token_bytes, end) is None:
                    pool.cache(row[group], own, token_bytes, end)
            link = pool.find(digest, token_bytes, end)
            chain.end = end = link or pool.cache(row[0], digest, token_bytes, end)
            chain.num_blocks = index + 1
            if self._coming:
                self._coming.pop(digest, None)

    def withdraw(self, request: Request) -> None:
        """As `KVCacheManager` has it, and what the request has given back as well: all that its tokens lead to."""
        super().withdraw(request)
        digests = (group_digest(digest, group) for digest in request.block_hashes for group in self.needs.windowed)
        links = (self.pool.link_with(digest) for digest in digests)
        self.pool.withdraw([link.block_id for link in links if link is not None])

    # ---- who holds what -------------------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_tokens_total: int,
        computed_blocks: Sequence[int] = (),
        num_reserved: int = 0,
        num_computed_tokens: int = 0,
    ) -> list[int] | None:
        """Give a request that holds nothing the rows for `num_tokens_total` tokens; returns its block table.

        `num_computed_tokens`: tokens whose keys and values will be there, found or copied back. In groups with windows
        blocks are taken for these alone, as far as they are read again; the others are promised.
        """
        assert not request.block_table, "a request with blocks is given others"
        needs, pool, size = self.needs, self.pool, self.num_groups
        num_found = len(computed_blocks) // size  # rows
        num_computed = max(num_computed_tokens, num_found * self.block_size)
        num_rows = needs.num_rows(num_tokens_total)
        end = num_rows if needs.is_at_once else needs.num_rows(num_computed)
        first = {group: min(needs.first_row(group, num_computed), end) for group in needs.windowed}
        windows = _Windows(first, end)
        table, missing = self._rows_to_hold(windows, num_rows, computed_blocks)
        found = [block_id for block_id in table if block_id != NULL_BLOCK]
        # Places of the blocks that it is alone to hold, those in groups with windows.
        own = [place for place, block_id in enumerate(table) if block_id != NULL_BLOCK and not pool.ref_cnt(block_id)]
        num_needed = len(missing) + len(own) + self._promises.num_to_lend(found)
        own = [place for place in (*own, *missing) if place % size in first]
        windows.num_own = {group: sum(place % size == group for place in own) for group in first}
        num_promised = self._most_to_take(windows, num_rows)
        if num_needed + num_promised + num_reserved > self.num_free_blocks:
            return None
        reach("kv.allocate_slots")
        link = pool.link_of(computed_blocks[-size]) if computed_blocks else None  # which may be gone by what is taken
        self._promises.touch(found)
        new_blocks = pool.allocate(len(missing))
        assert new_blocks is not None
        for place, block_id in zip(missing, new_blocks, strict=True):
            table[place] = block_id
        request.block_table = table
        self._chains[request.request_id] = Chain(link or request.cache_salt, num_found)
        self._windows[request.request_id] = windows
        if end < num_rows:
            self._promises.promise(request.request_id, num_promised, [table[place] for place in own])
        return table

    def _rows_to_hold(
        self, windows: _Windows, num_rows: int, computed_blocks: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """A block table of what was found and is read again, and the places in it for which blocks must be taken."""
        size = self.num_groups
        table = [*computed_blocks, *[NULL_BLOCK] * (num_rows * size - len(computed_blocks))]
        missing = []
        for place in range(num_rows * size):
            row, group = divmod(place, size)
            if group in windows.first and not windows.first[group] <= row < windows.end:
                table[place] = NULL_BLOCK
            elif table[place] == NULL_BLOCK:
                missing.append(place)
        return table, missing

    @property
    def promised(self) -> list[int]:
        """Ids of the requests some of whose blocks are promised only."""
        return self._promises.request_ids

    def take_rows(self, request: Request, num_tokens: int) -> list[tuple[int, int]]:
        """Take what was promised for the first `num_tokens` tokens: (place in the block table, block) of each."""
        windows, size = self._windows[request.request_id], self.num_groups
        end = self.needs.num_rows(num_tokens)
        if end <= windows.end:
            return []
        places = [row * size + group for row in range(windows.end, end) for group in windows.first]
        assert len(places) <= self._promises.of(request.request_id), "more is taken than was promised"
        block_ids = self.pool.allocate(len(places))
        assert block_ids is not None, "what was promised is not there"
        for place, block_id in zip(places, block_ids, strict=True):
            request.block_table[place] = block_id
        for group in windows.first:
            windows.num_own[group] += end - windows.end
        windows.end = end
        self._promise_again(request, windows, block_ids)
        return list(zip(places, block_ids, strict=True))

    def append_blocks(self, requests: Sequence[Request]) -> list[int]:
        """Grow each request's table by one row; returns the rows in order. As many must be free: check before."""
        reach("kv.append_blocks")
        size = self.num_groups
        block_ids = self.pool.allocate(len(requests) * size)
        assert block_ids is not None, "append_blocks was called without enough free blocks"
        for index, request in enumerate(requests):
            request.block_table.extend(block_ids[index * size : (index + 1) * size])
            self._windows[request.request_id].end += 1
        return block_ids

    def give_back(self, request: Request, num_computed_tokens: int) -> None:
        """What has fallen out of the windows when so many tokens are computed and their results read: launched steps
        compute tokens after those."""
        windows, table, size = self._windows[request.request_id], request.block_table, self.num_groups
        is_retained, kept, dropped = self.needs.is_retained, list[int](), list[int]()
        for group, old in windows.first.items():
            new = max(old, min(self.needs.first_row(group, num_computed_tokens), windows.end))
            for row in range(old, new):
                block_id, table[row * size + group] = table[row * size + group], NULL_BLOCK
                windows.num_own[group] -= self._promises.is_owner(request.request_id, block_id)
                (kept if is_retained(group, row, request.num_prompt_tokens) else dropped).append(block_id)
            windows.first[group] = new
        if not kept and not dropped:
            return
        links = (self.pool.link_of(block_id) for block_id in kept)
        windows.given_back += [link for link in links if link is not None]
        self._promises.disown(request.request_id, [*kept, *dropped])
        self.free_blocks(kept)
        self.free_blocks(dropped)
        self.pool.evict_first(dropped)
        self._promise_again(request, windows)

    def _most_to_take(self, windows: _Windows, num_rows: int) -> int:
        """Blocks that the request may still take for its rows before it gives any back."""
        left, most_rows = num_rows - windows.end, self.needs.most_rows
        return sum(min(left, most_rows[group] - own) for group, own in windows.num_own.items()) if left else 0

    def _promise_again(self, request: Request, windows: _Windows, taken: Sequence[int] = ()) -> None:
        if request.request_id not in self._promises:
            return
        num_rows = len(request.block_table) // self.num_groups
        if windows.end < num_rows:
            self._promises.promise(request.request_id, self._most_to_take(windows, num_rows), taken)
        else:
            self._promises.end(request.request_id, request.block_table)

    def free_blocks(self, block_ids: list[int]) -> None:
        self._promises.free(block_ids)

    def detach(self, request: Request) -> list[int]:
        """As `KVCacheManager` has it. What the prompt gave back is as new again, as the rest of it is."""
        windows = self._windows.pop(request.request_id, None)
        if windows is not None:
            self._promises.end(request.request_id, request.block_table)
            self.pool.renew(reversed(windows.given_back))
        return [block_id for block_id in super().detach(request) if block_id != NULL_BLOCK]

    def check_integrity(self, holders: Sequence[Sequence[int]]) -> None:
        super().check_integrity([[block_id for block_id in held if block_id != NULL_BLOCK] for held in holders])
        self._promises.check_integrity()
        for windows in self._windows.values():
            for group, own in windows.num_own.items():
                assert own <= self.needs.most_rows[group], "a window holds more than it may"
