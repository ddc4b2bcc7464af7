"""Block tables of requests, and reuse of prefixes: the KV cache as the scheduler sees it.

Asks and takes: `allocate_slots` returns blocks or None, and what None means is the scheduler's decision. This module
does not know steps, devices or tensors. A request's `block_table` and `block_hashes` are changed here alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.request import Request
from cb_backend.kv_cache.block_pool import BlockPool, CachedBlock, HashBlock, keyed_block_hash
from cb_backend.support.fault_points import reach

MIN_COMING_BLOCKS = 4  # fewer are computed again sooner than waited for


@dataclass(slots=True)
class Chain:
    """How far a request's blocks are in the prefix cache."""

    end: CachedBlock | bytes  # link of the last such block; the salt when there is none
    num_blocks: int
    is_closed: bool = False  # the cache was reset meanwhile: what hangs on earlier blocks is not cached any more


class KVCacheManager:
    """Block tables over one `BlockPool`, with a prefix cache of full blocks."""

    num_groups = 1  # blocks of a table for every `block_size` tokens

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_block: HashBlock | None = None,
    ) -> None:
        """`num_blocks` is the first dimension of the cache tensors, null block included."""
        self.pool = BlockPool(num_blocks, block_size)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.minds_full_blocks = enable_prefix_caching  # `cache_full_blocks` has something to do
        self._hash_block = hash_block or keyed_block_hash()
        self.num_reset_blocks = 0  # that were findable when the cache was reset
        self._coming: dict[bytes, int] = {}  # digest of a block being computed -> request that computes it
        self._announced: dict[int, list[bytes]] = {}  # request id -> its digests in _coming
        self._chains: dict[int, Chain] = {}  # by request id, of the requests that hold blocks

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def num_free_rows(self) -> int:
        """How many requests can grow by `block_size` tokens now."""
        return self.pool.num_free_blocks

    @property
    def num_free_tokens(self) -> int:
        """About how many tokens of requests yet to come the free blocks hold."""
        return self.pool.num_free_blocks * self.block_size

    @property
    def most_tokens(self) -> int:
        """The longest request that the whole cache can hold."""
        return self.num_usable_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a request of so many tokens holds at a time."""
        return -(-num_tokens // self.block_size)

    def num_blocks_held(self, num_tokens: NDArray[np.int32]) -> int:
        """By requests whose block tables have room for so many tokens, [num_requests]."""
        return int(num_tokens.sum()) // self.block_size

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Of those for `num_tokens` tokens, the blocks that the prefix cache does not have."""
        return self.num_blocks_for(num_tokens) - len(self.get_computed_blocks(request)[0])

    def growth(self, held: NDArray[np.float64], to_come: NDArray[np.float64], most_at_once: float) -> int:
        """Blocks for what requests are to grow. Arrays [num_requests], in tokens; `most_at_once`: tokens of all of them
        together that are held at a time."""
        return int(most_at_once / self.block_size)

    def kept(self, block_table: Sequence[int], num_tokens: int) -> Sequence[int]:
        """The beginning of a block table that holds `num_tokens` tokens, as far as it is read after them."""
        return block_table[: self.num_blocks_for(num_tokens)]

    def get_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        """Cached blocks that begin the request's tokens, and how many tokens they hold. Changes no block.

        None for a request that must compute its whole prompt. Never all tokens: at least the last is computed again,
        because its logits are needed. Valid until the pool changes; pass the blocks to `allocate_slots` before
        anything else.
        """
        block_ids = [link.block_id for link in self._cached_chain(request)]
        return block_ids, len(block_ids) * self.block_size

    def _cached_chain(self, request: Request) -> list[CachedBlock]:
        """The links that begin the request's tokens, all but the last token."""
        chain: list[CachedBlock] = []
        may_read = self.enable_prefix_caching and request.may_read_cache
        for index in range((len(request.token_ids) - 1) // self.block_size if may_read else 0):
            parent = chain[-1] if chain else request.cache_salt
            (token_bytes,) = self._contents(request.token_ids, index, index + 1)
            link = self.pool.find(self._digest(request, index, token_bytes), token_bytes, parent)
            if link is None:
                break
            chain.append(link)
        return chain

    def num_findable_blocks(self, request: Request) -> int:
        """About how many blocks `get_computed_blocks` would find, in a few look-ups: digests only, by bisection."""
        if not request.may_read_cache:
            return 0
        low, high = 0, (len(request.token_ids) - 1) // self.block_size
        self._digest_until(request, high)
        while low < high:
            middle = (low + high) // 2
            if self.pool.has_digest(request.block_hashes[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def has_findable_blocks(self, request: Request, num_blocks: int) -> bool:
        """Whether there are about as many (1 or more), in one look-up."""
        if not request.may_read_cache or num_blocks > (len(request.token_ids) - 1) // self.block_size:
            return False
        self._digest_until(request, num_blocks)
        return self.pool.has_digest(request.block_hashes[num_blocks - 1])

    def allocate_slots(
        self,
        request: Request,
        num_tokens_total: int,
        computed_blocks: Sequence[int] = (),
        num_reserved: int = 0,
        num_computed_tokens: int = 0,
    ) -> list[int] | None:
        """Grow the request's block table until it holds `num_tokens_total` tokens; returns the added blocks.

        `computed_blocks` (at admission only) come first in the table and are part of what is returned.
        None, and nothing changes, if after that fewer than `num_reserved` blocks would be free.
        `num_computed_tokens`, of those to be copied back as well, make no difference where all blocks are kept.
        """
        pool = self.pool
        num_new = self.num_blocks_for(num_tokens_total) - len(request.block_table) - len(computed_blocks)
        num_revived = sum(pool.ref_cnt(block_id) == 0 for block_id in computed_blocks)
        if num_new + num_revived + num_reserved > pool.num_free_blocks:
            return None
        reach("kv.allocate_slots")
        pool.touch(computed_blocks)
        new_blocks = pool.allocate(max(num_new, 0))
        assert new_blocks is not None
        added = [*computed_blocks, *new_blocks]
        request.block_table.extend(added)
        if request.request_id not in self._chains:
            end = pool.link_of(computed_blocks[-1]) if computed_blocks else None
            self._chains[request.request_id] = Chain(end or request.cache_salt, len(computed_blocks))
        return added

    def append_blocks(self, requests: Sequence[Request]) -> list[int]:
        """Grow each request's table by one block; returns them in order. As many must be free: check before."""
        reach("kv.append_blocks")
        block_ids = self.pool.allocate(len(requests))
        assert block_ids is not None, "append_blocks was called without enough free blocks"
        for request, block_id in zip(requests, block_ids, strict=True):
            request.block_table.append(block_id)
        return block_ids

    def cache_full_blocks(self, request: Request, token_ids: NDArray[np.int32], num_computed_tokens: int) -> None:
        """Make the request's full computed blocks findable. `token_ids` [>= num_computed_tokens], values known.

        Where another request's block already has the same content, that block stays the one that is found.
        """
        if not self.enable_prefix_caching:
            return
        reach("kv.cache_full_blocks")
        chain = self._chains[request.request_id]
        if chain.is_closed:
            return
        pool, end = self.pool, chain.end
        if isinstance(end, CachedBlock) and not end.is_live:
            # The link came from another request's block, which was evicted: our own blocks take its place.
            end, chain.num_blocks = request.cache_salt, 0
        index = chain.num_blocks
        for token_bytes in self._contents(token_ids, index, num_computed_tokens // self.block_size):
            digest = self._digest(request, index, token_bytes)
            link = pool.find(digest, token_bytes, end)
            chain.end = end = link or pool.cache(request.block_table[index], digest, token_bytes, end)
            chain.num_blocks = index = index + 1
            if self._coming:
                self._coming.pop(digest, None)

    def announce(self, request: Request) -> None:
        """A request that has just got its blocks is going to compute what it did not find: others may wait for it."""
        if not self.enable_prefix_caching:
            return
        num_found, num_full = self._chains[request.request_id].num_blocks, len(request.token_ids) // self.block_size
        self._digest_until(request, num_full)
        coming, own, hashes = self._coming, request.request_id, request.block_hashes[num_found:num_full]
        self._announced[own] = [digest for digest in hashes if coming.setdefault(digest, own) == own]

    def is_prefix_coming(self, request: Request) -> bool:
        """Whether another request is computing enough of this one's tokens that waiting for it is better.

        Enough: `MIN_COMING_BLOCKS` blocks right after those that are found, and a quarter of what is missing.
        """
        if not self._coming or not request.may_read_cache:
            return False
        _, num_computed = self.get_computed_blocks(request)
        first, last = num_computed // self.block_size, (len(request.token_ids) - 1) // self.block_size
        self._digest_until(request, last)
        coming = itertools.takewhile(self._coming.__contains__, request.block_hashes[first:last])
        num_coming, num_missing = sum(1 for _ in coming), last - first
        return num_coming >= MIN_COMING_BLOCKS and num_coming * 4 >= num_missing

    def withdraw(self, request: Request) -> None:
        """Make nothing that the request holds findable any more: its numbers were not finite, or its step failed."""
        self.pool.withdraw(request.block_table)

    def reset_prefix_cache(self) -> int:
        """Make nothing findable that was computed until now, held or free; returns how many blocks were findable.

        Requests that hold blocks go on, but what they compute hangs on earlier blocks and is not cached either.
        """
        num_blocks = self.pool.num_cached_blocks
        self.num_reset_blocks += num_blocks
        self.pool.withdraw(self.pool.cached_blocks())
        self._coming.clear()
        self._announced.clear()
        for chain in self._chains.values():
            chain.is_closed = True
        return num_blocks

    def detach(self, request: Request) -> list[int]:
        """Take the block table away from the request. The blocks, last first, still have to go to `free_blocks`."""
        self._chains.pop(request.request_id, None)
        for digest in self._announced.pop(request.request_id, ()):
            if self._coming.get(digest) == request.request_id:
                del self._coming[digest]
        block_ids = request.block_table[::-1]
        request.block_table = []
        return block_ids

    def free_blocks(self, block_ids: list[int]) -> None:
        self.pool.free(block_ids)

    def free(self, request: Request) -> None:
        """Give all the request's blocks back at once; no launched step may still touch them."""
        self.free_blocks(self.detach(request))

    def check_integrity(self, holders: Sequence[Sequence[int]]) -> None:
        """Raise `AssertionError` unless `holders` (every block list in existence) explain all reference counts."""
        self.pool.check_integrity()
        counts = Counter(itertools.chain.from_iterable(holders))
        held = self.pool.held_blocks()
        assert held == counts, f"references {held} differ from holders {dict(counts)}"

    def _contents(self, token_ids: NDArray[np.int32], first: int, last: int) -> list[bytes]:
        """Of the blocks from `first` to before `last`: one copy of all tokens, then parts of it."""
        size = self.block_size
        content = token_ids[first * size : last * size].tobytes()
        if last - first == 1:
            return [content]
        size *= token_ids.itemsize
        return [content[at : at + size] for at in range(0, len(content), size)]

    def _digest_until(self, request: Request, num_blocks: int) -> None:
        """Have the digests of the request's first blocks, which its tokens fill."""
        num_known = len(request.block_hashes)
        if num_known < num_blocks:  # asked for again and again while the request waits
            for index, token_bytes in enumerate(self._contents(request.token_ids, num_known, num_blocks), num_known):
                self._digest(request, index, token_bytes)

    def _digest(self, request: Request, index: int, token_bytes: bytes) -> bytes:
        """Digest of the request's block `index`; digests before it must have been asked for already."""
        hashes = request.block_hashes
        if index == len(hashes):
            parent = hashes[-1] if hashes else self._hash_block(b"", request.cache_salt)
            hashes.append(self._hash_block(parent, token_bytes))
        return hashes[index]
