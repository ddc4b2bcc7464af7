"""A promise is kept whoever else takes, shares and gives back blocks."""

from __future__ import annotations

import random

import pytest

from cb_backend.kv_cache.block_pool import BlockPool
from cb_backend.kv_cache.promises import Promises


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(11, 4)


def taken(pool: BlockPool, number: int) -> list[int]:
    blocks = pool.allocate(number)
    assert blocks is not None
    return blocks


def test_promised_blocks_are_counted_until_the_end(pool: BlockPool) -> None:
    promises = Promises(pool)
    promises.promise(1, 4)
    promises.promise(2, 3)
    assert (promises.num_blocks, promises.of(1), promises.of(3), promises.request_ids) == (7, 4, 0, [1, 2])
    promises.promise(1, 0)
    assert (1 in promises, promises.num_blocks) == (True, 3)  # it will take blocks when it has given some back
    promises.end(1, [])
    promises.end(2, [])
    promises.end(9, [])
    assert (1 in promises, promises.num_blocks, promises.request_ids) == (False, 0, [])


def test_another_block_is_kept_back_for_one_that_is_shared(pool: BlockPool) -> None:
    """What its owner gives back frees nothing then, and the owner has to go on."""
    promises = Promises(pool)
    own = taken(pool, 2)
    promises.promise(1, 3, own)
    assert promises.num_to_lend(own) == 2
    promises.touch(own)
    assert (promises.num_blocks, promises.num_to_lend(own)) == (5, 0)
    promises.touch(own[:1])  # a third holder asks for no more
    assert promises.num_blocks == 5
    promises.free(own[:1])
    assert promises.num_blocks == 5
    promises.free(own[:1])
    assert promises.num_blocks == 4
    assert [promises.is_owner(owner, own[1]) for owner in (1, 2)] == [True, False]
    promises.disown(1, own[1:])
    promises.free(own[1:])  # the owner's
    assert pool.ref_cnt(own[1]) == 1
    promises.promise(1, 4)
    assert promises.num_blocks == 4
    promises.check_integrity()


def test_blocks_of_others_are_not_disowned(pool: BlockPool) -> None:
    promises = Promises(pool)
    own = taken(pool, 1)
    promises.promise(1, 1, own)
    promises.disown(2, own)
    assert promises.is_owner(1, own[0])
    promises.touch(own)
    promises.end(2, own)
    assert promises.num_blocks == 2
    promises.end(1, own)
    assert promises.num_blocks == 0


@pytest.mark.parametrize("broken", ["total", "lent", "free", "nobody", "too much"])
def test_what_does_not_add_up_is_found(pool: BlockPool, broken: str) -> None:
    promises = Promises(pool)
    own = taken(pool, 2)
    promises.promise(1, 2, own)
    promises.check_integrity()
    if broken == "total":
        promises._total += 1
    elif broken == "lent":
        pool.touch(own)
    elif broken == "free":
        pool.free(own)
    elif broken == "nobody":
        promises._promised, promises._total = {}, 0
    else:
        promises.promise(1, 9)
    with pytest.raises(AssertionError):
        promises.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_promises_can_be_kept_whatever_happens(seed: int) -> None:
    """Requests take, share and give back at random, but nobody beyond what is free and not promised."""
    rng, pool = random.Random(seed), BlockPool(31, 4)
    promises = Promises(pool)
    held: dict[int, list[int]] = {}
    most = 6  # own blocks and promised ones together
    for request_id in range(300):
        if rng.random() < 0.4 and held:
            leaving = rng.choice([*held])
            promises.end(leaving, held[leaving])
            promises.free(held.pop(leaving))
        others = [block for blocks in held.values() for block in blocks]
        shared = list(dict.fromkeys(rng.choices(others, k=rng.randint(0, 3)))) if others else []
        if most + promises.num_to_lend(shared) <= pool.num_free_blocks - promises.num_blocks:
            promises.touch(shared)
            held[request_id] = shared
            promises.promise(request_id, most)
        for going_on in promises.request_ids:
            own = [block for block in held[going_on] if promises.is_owner(going_on, block)]
            if promises.of(going_on) and rng.random() < 0.7:
                new = taken(pool, 1)
                held[going_on] += new
                promises.promise(going_on, most - len(own) - 1, new)
            elif own:
                block = own[0]
                promises.disown(going_on, [block])
                held[going_on].remove(block)
                promises.free([block])
                promises.promise(going_on, most - len(own) + 1)
        promises.check_integrity()
