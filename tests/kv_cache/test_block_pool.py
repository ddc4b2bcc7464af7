"""The block pool: reference counts, order of eviction, and content that is compared and not only hashed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cb_backend.kv_cache.block_pool import NULL_BLOCK, BlockPool, CachedBlock

NO_SALT = b""


def content(number: int) -> bytes:
    """Token bytes of a full block of two tokens."""
    return number.to_bytes(8, "little")


def test_gives_out_every_block_but_the_null_block() -> None:
    pool = BlockPool(num_blocks=5, block_size=2)
    assert sorted(pool.allocate(4) or []) == [1, 2, 3, 4]
    assert pool.num_free_blocks == 0


def test_too_many_blocks_are_refused_and_nothing_changes() -> None:
    pool = BlockPool(num_blocks=5, block_size=2)
    assert pool.allocate(5) is None
    assert pool.num_free_blocks == 4
    pool.check_integrity()


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockPool(num_blocks=1, block_size=2)


def test_one_block_beside_the_null_block_is_enough() -> None:
    assert BlockPool(num_blocks=2, block_size=2).allocate(1) == [1]


def cached_pool(num_blocks: int) -> tuple[BlockPool, list[CachedBlock]]:
    """All blocks free and cached, the first freed longest ago."""
    pool = BlockPool(num_blocks + 1, block_size=2)
    block_ids = pool.allocate(num_blocks) or []
    links = [pool.cache(block_id, b"%d" % block_id, content(block_id), NO_SALT) for block_id in block_ids]
    pool.free(block_ids)
    return pool, links


def test_what_is_to_be_evicted_first_is() -> None:
    pool, _ = cached_pool(4)
    held = pool.allocate(1)  # block 1, which has no content now
    pool.evict_first([3, 1])
    assert pool.allocate(2) == [3, 2]
    assert held == [1]


def test_renewed_content_is_evicted_last() -> None:
    pool, links = cached_pool(4)
    gone = pool.allocate(1)
    pool.touch([4])
    pool.renew(links[:3])  # the first has lost its block, the last is held
    assert gone == [1]
    pool.free([4])
    pool.renew([links[1]])
    assert pool.allocate(3) == [3, 4, 2]
    pool.renew(links)
    pool.check_integrity()


def test_whatever_has_a_digest_is_found_by_it() -> None:
    pool, links = cached_pool(2)
    assert pool.link_with(b"2") is links[1]
    assert pool.link_with(b"3") is None


def test_freeing_twice_is_an_error() -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.free(block_ids)
    with pytest.raises(RuntimeError, match="nobody holds it"):
        pool.free(block_ids)


def test_blocks_without_content_go_first_then_the_longest_free() -> None:
    pool = BlockPool(num_blocks=5, block_size=2)
    first, second, third, plain = pool.allocate(4) or []
    for number, block_id in enumerate((first, second, third)):
        pool.cache(block_id, b"digest %d" % number, content(number), NO_SALT)
    pool.free([second])
    pool.free([first])
    pool.free([plain])
    pool.free([third])
    assert pool.allocate(3) == [plain, second, first]
    assert pool.num_evicted_blocks == 2
    assert pool.find(b"digest 1", content(1), NO_SALT) is None
    link = pool.find(b"digest 2", content(2), NO_SALT)
    assert link is not None
    assert link.block_id == third


def test_a_hit_takes_the_block_out_of_the_line_for_eviction() -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    old, new = pool.allocate(2) or []
    pool.cache(old, b"old", content(1), NO_SALT)
    pool.cache(new, b"new", content(2), NO_SALT)
    pool.free([old, new])
    pool.touch([old])
    assert pool.ref_cnt(old) == 1
    assert pool.allocate(1) == [new]
    assert pool.allocate(1) is None


def test_an_equal_digest_with_other_content_is_a_miss() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    root, child, _ = pool.allocate(3) or []
    parent = pool.cache(root, b"root", content(1), NO_SALT)
    pool.cache(child, b"child", content(2), parent)
    stranger = CachedBlock(b"root", content(1), NO_SALT, root)
    assert pool.find(b"root", content(1), NO_SALT) is parent
    assert pool.find(b"root", content(9), NO_SALT) is None, "other tokens"
    assert pool.find(b"root", content(1), b"tenant") is None, "other salt"
    assert pool.find(b"child", content(2), stranger) is None, "other parent, though it looks the same"


def test_the_newest_content_keeps_a_digest() -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    old, new = pool.allocate(2) or []
    old_link = pool.cache(old, b"same", content(1), NO_SALT)
    pool.free([old])
    pool.cache(new, b"same", content(2), NO_SALT)
    assert not old_link.is_live
    assert pool.find(b"same", content(1), NO_SALT) is None
    pool.check_integrity()
    assert pool.allocate(1) == [old]
    assert pool.num_evicted_blocks == 0, "the block had lost its content before"


def test_withdrawn_content_is_not_found_and_its_block_stays_held() -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    held, free = pool.allocate(2) or []
    pool.cache(held, b"held", content(1), NO_SALT)
    pool.cache(free, b"free", content(2), NO_SALT)
    pool.free([free])
    pool.withdraw([held, free])
    assert pool.num_cached_blocks == 0
    assert (pool.ref_cnt(held), pool.num_free_blocks) == (1, 1)
    pool.check_integrity()


class PoolAgainstModel(RuleBasedStateMachine):
    """Random use of a pool beside a naive model: a list of holders, and lists for the order of frees."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=9, block_size=2)
        self.held: list[int] = []  # one entry a reference
        self.number_of: dict[int, int] = {}  # cached block -> content
        self.cached_free: list[int] = []  # longest free first
        self.evicted = 0

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        num_plain = 8 - len(set(self.held)) - len(self.cached_free)
        block_ids = self.pool.allocate(count)
        if count > num_plain + len(self.cached_free):
            assert block_ids is None
            return
        assert block_ids is not None
        num_victims = max(0, count - num_plain)
        victims, self.cached_free = self.cached_free[:num_victims], self.cached_free[num_victims:]
        assert block_ids[count - num_victims :] == victims
        assert set(block_ids).isdisjoint([*self.held, *self.cached_free, NULL_BLOCK])
        for block_id in victims:
            del self.number_of[block_id]
        self.evicted += num_victims
        self.held.extend(block_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.held))
        self.held.remove(block_id)
        self.pool.free([block_id])
        if block_id not in self.held and block_id in self.number_of:
            self.cached_free.append(block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), number=st.integers(0, 5))
    def cache(self, data: st.DataObject, number: int) -> None:
        block_id = data.draw(st.sampled_from(self.held))
        self.pool.cache(block_id, b"%d" % number, content(number), NO_SALT)
        for other in [other for other, n in self.number_of.items() if n == number]:
            del self.number_of[other]
            if other in self.cached_free:
                self.cached_free.remove(other)
        self.number_of[block_id] = number

    @rule(number=st.integers(0, 5))
    def hit(self, number: int) -> None:
        link = self.pool.find(b"%d" % number, content(number), NO_SALT)
        expected = [block_id for block_id, n in self.number_of.items() if n == number]
        assert ([] if link is None else [link.block_id]) == expected
        assert self.pool.has_digest(b"%d" % number) == bool(expected)
        if link is not None:
            self.pool.touch([link.block_id])
            self.held.append(link.block_id)
            if link.block_id in self.cached_free:
                self.cached_free.remove(link.block_id)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert [self.pool.ref_cnt(block_id) for block_id in range(9)] == [self.held.count(b) for b in range(9)]
        assert self.pool.num_free_blocks == 8 - len(set(self.held))
        assert self.pool.num_evicted_blocks == self.evicted


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
