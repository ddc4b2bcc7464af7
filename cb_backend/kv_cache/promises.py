"""Blocks that are free and yet spoken for: prompts that have begun will take them, step by step.

A promise is kept whatever others do: everybody else may take what is free beyond it. What a request with a promise
gives back frees a block for it to go on with, unless others hold that block as well: for each such block another one is
kept back. This module does not know windows, rows or tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from cb_backend.kv_cache.block_pool import BlockPool


class Promises:
    """By request id."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._promised: dict[int, int] = {}
        self._owner: dict[int, int] = {}  # of blocks that requests with promises have taken themselves
        self._num_lent = 0  # of these, how many others hold as well
        self._total = 0

    @property
    def num_blocks(self) -> int:
        """Free blocks that are spoken for."""
        return self._total + self._num_lent

    @property
    def request_ids(self) -> list[int]:
        """Who has blocks to take, now or when some have been given back."""
        return list(self._promised)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._promised

    def of(self, request_id: int) -> int:
        return self._promised.get(request_id, 0)

    def is_owner(self, request_id: int, block_id: int) -> bool:
        return self._owner.get(block_id) == request_id

    def promise(self, request_id: int, num_blocks: int, taken: Iterable[int] = ()) -> None:
        """Promise the request so many blocks from now on. It has taken `taken` itself."""
        self._total += num_blocks - self._promised.get(request_id, 0)
        self._promised[request_id] = num_blocks
        self._owner.update(dict.fromkeys(taken, request_id))

    def end(self, request_id: int, block_ids: Iterable[int]) -> None:
        """The request, which holds these blocks, needs no more."""
        self.disown(request_id, block_ids)
        self._total -= self._promised.pop(request_id, 0)

    def disown(self, request_id: int, block_ids: Iterable[int]) -> None:
        """The request is about to give these back."""
        for block_id in block_ids:
            if self._owner.get(block_id) == request_id:
                del self._owner[block_id]
                self._num_lent -= self._pool.ref_cnt(block_id) > 1

    def num_to_lend(self, block_ids: Iterable[int]) -> int:
        """Blocks to keep back if somebody else came to hold these."""
        return sum(block_id in self._owner and self._pool.ref_cnt(block_id) == 1 for block_id in block_ids)

    def touch(self, block_ids: list[int]) -> None:
        """Add a holder to each of these blocks, which are not his own."""
        self._num_lent += self.num_to_lend(block_ids)
        self._pool.touch(block_ids)

    def free(self, block_ids: list[int]) -> None:
        """Take a holder from each; owners have disowned them before."""
        for block_id in block_ids:
            self._num_lent -= block_id in self._owner and self._pool.ref_cnt(block_id) == 2
        self._pool.free(block_ids)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless all promises can be kept."""
        ref_cnt = self._pool.ref_cnt
        assert self._total == sum(self._promised.values()), "the promises do not add up"
        assert self._num_lent == sum(ref_cnt(block_id) > 1 for block_id in self._owner), "lent blocks do not add up"
        assert all(ref_cnt(block_id) for block_id in self._owner), "an owned block is free"
        assert set(self._owner.values()) <= self._promised.keys(), "somebody without a promise owns blocks"
        assert self.num_blocks <= self._pool.num_free_blocks, "more is promised than is there"
