"""The blocks of the KV cache as numbers: which are free, who holds how many, which hold reusable content.

A block is in exactly one of three states: held (`ref_cnt` > 0), free without content, or free but cached (its content
can still be hit, and it is evicted when space is needed). This module does not know requests, tensors or devices; how
blocks form a request's table is `kv_cache.manager`'s work. Block 0 is the null block: padding is written there, so it
is never given out, freed or cached.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import msgspec

HashBlock = Callable[[bytes, bytes], bytes]  # (digest of the parent, content) -> digest

NULL_BLOCK = 0
DIGEST_BYTES = 16


def keyed_block_hash() -> HashBlock:
    """A 128-bit hash under a random key of this process, so that no prompt can be built to collide with another's."""
    keyed = blake2b(key=os.urandom(32), digest_size=DIGEST_BYTES)

    def hash_block(parent_digest: bytes, content: bytes) -> bytes:
        state = keyed.copy()  # the key is taken in once
        state.update(parent_digest + content)
        return state.digest()

    return hash_block


class CachedBlock(msgspec.Struct, eq=False):
    """The content of one full block, as a link of a chain that goes back to the first token.

    Links are compared by identity: two links with the same parent link and the same tokens stand for the same prefix,
    whatever their digests are. That is what makes a digest collision a miss instead of a wrong answer.
    """

    digest: bytes
    token_bytes: bytes  # int32 token ids of this block
    parent: CachedBlock | bytes  # the link before it; for a first block the cache salt
    block_id: int  # NULL_BLOCK once the block was evicted or its content withdrawn

    @property
    def is_live(self) -> bool:
        return self.block_id != NULL_BLOCK


class BlockPool:
    """Gives out blocks and takes them back; keeps freed full blocks for reuse until their space is needed.

    Free blocks without content are used first; after them the cached block that has been free for longest. An
    OrderedDict keeps that order with removal from the middle (a hit) in constant time.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` counts the null block, as the tensors do; at least one more is needed."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; the null block and at least one more are needed")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evicted_blocks = 0
        self._ref_cnt = [0] * num_blocks
        self._free_plain = list(range(num_blocks - 1, NULL_BLOCK, -1))  # popped from the end: low ids first
        self._free_cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self._link_of_digest: dict[bytes, CachedBlock] = {}
        self._link_of_block: list[CachedBlock | None] = [None] * num_blocks

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could give out now, cached ones included."""
        return len(self._free_plain) + len(self._free_cached)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._link_of_digest)

    def cached_blocks(self) -> list[int]:
        return [link.block_id for link in self._link_of_digest.values()]

    def ref_cnt(self, block_id: int) -> int:
        return self._ref_cnt[block_id]

    def held_blocks(self) -> dict[int, int]:
        """Reference count of every block that has one."""
        return {block_id: count for block_id, count in enumerate(self._ref_cnt) if count}

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks with one reference each, or None (and nothing changes) if fewer are free."""
        if num_blocks > self.num_free_blocks:
            return None
        first_plain = max(0, len(self._free_plain) - num_blocks)
        block_ids = self._free_plain[first_plain:][::-1]
        del self._free_plain[first_plain:]
        for _ in range(num_blocks - len(block_ids)):
            block_id, _ = self._free_cached.popitem(last=False)
            self._forget(block_id)
            self.num_evicted_blocks += 1
            block_ids.append(block_id)
        for block_id in block_ids:
            self._ref_cnt[block_id] = 1
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block (a prefix hit); a free cached block stops being evictable."""
        for block_id in block_ids:
            if self._ref_cnt[block_id] == 0:
                del self._free_cached[block_id]
            self._ref_cnt[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Give back one reference of each block. Pass a request's last block first, so that tails are evicted first.

        Raises `RuntimeError` for a block that nobody holds: that is a bug of the caller, never of a request.
        """
        for block_id in block_ids:
            ref_cnt = self._ref_cnt[block_id] - 1
            if ref_cnt < 0:
                raise RuntimeError(f"block {block_id} is freed but nobody holds it")
            self._ref_cnt[block_id] = ref_cnt
            if ref_cnt == 0:
                if self._link_of_block[block_id] is None:
                    self._free_plain.append(block_id)
                else:
                    self._free_cached[block_id] = None

    def evict_first(self, block_ids: Iterable[int]) -> None:
        """Of cached blocks that nobody holds: they are the first to go when space is needed. Others are left alone."""
        for block_id in block_ids:
            if block_id in self._free_cached:
                self._free_cached.move_to_end(block_id, last=False)

    def renew(self, links: Iterable[CachedBlock]) -> None:
        """As if these blocks had been given back just now, in this order, where nobody holds them."""
        for link in links:
            if link.block_id in self._free_cached:  # the null block, of a link that is gone, is never free
                self._free_cached.move_to_end(link.block_id)

    def link_of(self, block_id: int) -> CachedBlock | None:
        """The cached content of a block, or None if its content cannot be hit."""
        return self._link_of_block[block_id]

    def has_digest(self, digest: bytes) -> bool:
        """Whether some block has this digest; its content may still be another."""
        return digest in self._link_of_digest

    def link_with(self, digest: bytes) -> CachedBlock | None:
        """Whatever has this digest; its content may be another."""
        return self._link_of_digest.get(digest)

    def find(self, digest: bytes, token_bytes: bytes, parent: CachedBlock | bytes) -> CachedBlock | None:
        """The live link with exactly this content, or None. An equal digest with other content is None."""
        link = self._link_of_digest.get(digest)
        if link is not None and link.token_bytes == token_bytes and link.parent == parent:
            return link
        return None

    def cache(self, block_id: int, digest: bytes, token_bytes: bytes, parent: CachedBlock | bytes) -> CachedBlock:
        """Make a held, full, computed block findable and return its link.

        Whatever had this digest before gives way: it holds other content, or hangs on a link that is gone, so nothing
        would find it again.
        """
        if self._ref_cnt[block_id] == 0:
            raise RuntimeError(f"block {block_id} is cached but nobody holds it")
        old = self._link_of_digest.get(digest)
        if old is not None:
            self.withdraw((old.block_id,))
        if self._link_of_block[block_id] is not None:
            self._forget(block_id)
        link = CachedBlock(digest, token_bytes, parent, block_id)
        self._link_of_digest[digest] = link
        self._link_of_block[block_id] = link
        return link

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """Forget the content of these blocks, held or free; blocks that are not cached are left as they are."""
        for block_id in block_ids:
            if self._link_of_block[block_id] is not None:
                self._forget(block_id)
                if self._ref_cnt[block_id] == 0:
                    del self._free_cached[block_id]
                    self._free_plain.append(block_id)

    def _forget(self, block_id: int) -> None:
        link = self._link_of_block[block_id]
        assert link is not None
        del self._link_of_digest[link.digest]
        self._link_of_block[block_id] = None
        link.block_id = NULL_BLOCK

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every block is in exactly one place and the cache's two maps agree."""
        ref_cnt, link_of_block = self._ref_cnt, self._link_of_block
        free = {*self._free_plain, *self._free_cached}
        assert len(free) == self.num_free_blocks, "a block is free twice"
        assert NULL_BLOCK not in free, "the null block is free"
        assert not ref_cnt[NULL_BLOCK], "the null block is held"
        assert min(ref_cnt) >= 0, "a reference count is negative"
        assert not any(map(ref_cnt.__getitem__, free)), f"blocks {self.held_blocks().keys() & free} are held and free"
        assert ref_cnt.count(0) == len(free) + 1, "a block is lost"
        # Each digest leads to a link that says so and has a block of its own: as many blocks are all that have links.
        num_content_bytes = 4 * self.block_size
        for digest, link in self._link_of_digest.items():
            assert link.digest == digest, f"digest of block {link.block_id} leads elsewhere"
            assert link_of_block[link.block_id] is link, f"block {link.block_id} holds another link"
            assert len(link.token_bytes) == num_content_bytes, f"block {link.block_id} is cached but not full"
        num_links = self.num_blocks - link_of_block.count(None)
        assert num_links == len(self._link_of_digest), "the cache's maps differ in size"
        assert link_of_block[NULL_BLOCK] is None, "the null block is cached"
        assert not any(map(link_of_block.__getitem__, self._free_plain)), "a block without content is cached"
        assert all(map(link_of_block.__getitem__, self._free_cached)), "a block is kept for content it does not have"
