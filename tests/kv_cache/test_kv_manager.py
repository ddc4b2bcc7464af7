"""The KV manager: block tables, prefix hits, and what must never be a hit."""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.contracts.request import Request
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.kv_cache.block_pool import keyed_block_hash
from cb_backend.kv_cache.manager import KVCacheManager

BLOCK = 4


def make_request(request_id: int, tokens: list[int], salt: bytes = b"") -> Request:
    token_ids = np.array(tokens, np.int32)
    return Request(request_id, token_ids, len(tokens), TokenRules(), (), len(tokens) + 16, cache_salt=salt)


def run_prompt(kv: KVCacheManager, request: Request) -> int:
    """Admit a request and compute its whole prompt; returns how many tokens were found."""
    computed_blocks, num_computed = kv.get_computed_blocks(request)
    assert kv.allocate_slots(request, len(request.token_ids), computed_blocks) is not None
    kv.cache_full_blocks(request, request.token_ids, len(request.token_ids))
    return num_computed


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_table_has_as_many_blocks_as_its_tokens_need(num_tokens: int, num_blocks: int) -> None:
    kv = KVCacheManager(10, BLOCK)
    request = make_request(1, list(range(num_tokens)))
    added = kv.allocate_slots(request, num_tokens)
    assert added == request.block_table
    assert len(request.block_table) == num_blocks
    room = num_blocks * BLOCK
    assert kv.allocate_slots(request, room) == []
    assert len(kv.allocate_slots(request, room + 1) or []) == 1


def test_none_when_blocks_are_short_or_reserved_and_nothing_changes() -> None:
    kv = KVCacheManager(4, BLOCK)
    request = make_request(1, list(range(12)))
    assert kv.allocate_slots(request, 13) is None
    assert kv.allocate_slots(request, 12, num_reserved=1) is None
    assert (request.block_table, kv.num_free_blocks) == ([], 3)
    assert len(kv.allocate_slots(request, 12) or []) == 3


def test_a_second_request_shares_the_full_blocks_of_the_common_prefix() -> None:
    kv = KVCacheManager(20, BLOCK)
    first, second = make_request(1, list(range(11))), make_request(2, [*range(9), 77, 78])
    assert run_prompt(kv, first) == 0
    assert run_prompt(kv, second) == 8
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    kv.check_integrity([first.block_table, second.block_table])


def test_a_partial_block_is_never_found() -> None:
    kv = KVCacheManager(20, BLOCK)
    run_prompt(kv, make_request(1, list(range(7))))
    assert kv.get_computed_blocks(make_request(2, list(range(12))))[1] == 4


@pytest.mark.parametrize("num_tokens", [4, 8, 9])
def test_m6_the_last_token_is_always_computed_again(num_tokens: int) -> None:
    kv = KVCacheManager(20, BLOCK)
    run_prompt(kv, make_request(1, list(range(num_tokens))))
    assert run_prompt(kv, make_request(2, list(range(num_tokens)))) == (num_tokens - 1) // BLOCK * BLOCK


def test_m1_another_salt_never_shares() -> None:
    """Case M1, of the key that stands for whatever changes what a prompt's keys and values are."""
    kv = KVCacheManager(20, BLOCK)
    run_prompt(kv, make_request(1, list(range(9)), salt=b"tenant one"))
    assert kv.get_computed_blocks(make_request(2, list(range(9)), salt=b"tenant two")) == ([], 0)
    assert kv.get_computed_blocks(make_request(3, list(range(9))))[1] == 0
    assert kv.get_computed_blocks(make_request(4, list(range(9)), salt=b"tenant one"))[1] == 8


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    kv = KVCacheManager(20, BLOCK)
    run_prompt(kv, make_request(1, [1, 1, 1, 1, 5, 5, 5, 5, 0]))
    run_prompt(kv, make_request(2, [2, 2, 2, 2, 6, 6, 6, 6, 0]))
    assert kv.get_computed_blocks(make_request(3, [1, 1, 1, 1, 6, 6, 6, 6, 0]))[1] == BLOCK


def test_switched_off_nothing_is_found() -> None:
    kv = KVCacheManager(20, BLOCK, enable_prefix_caching=False)
    run_prompt(kv, make_request(1, list(range(9))))
    assert run_prompt(kv, make_request(2, list(range(9)))) == 0
    assert kv.pool.num_cached_blocks == 0


def test_a_freed_prefix_is_found_until_its_blocks_are_needed_tails_first() -> None:
    kv = KVCacheManager(4, BLOCK)
    first = make_request(1, list(range(12)))
    run_prompt(kv, first)
    kv.free(first)
    assert kv.num_free_blocks == 3
    other = make_request(2, [50])
    assert kv.allocate_slots(other, 1) is not None  # needs one block: the last of the prefix
    assert kv.get_computed_blocks(make_request(3, [*range(12), 0]))[1] == 8
    kv.check_integrity([other.block_table])


def test_reviving_free_cached_blocks_counts_as_using_them() -> None:
    kv = KVCacheManager(4, BLOCK)
    first = make_request(1, list(range(8)))
    run_prompt(kv, first)
    kv.free(first)
    second = make_request(2, [*range(8), *range(40, 48)])  # 2 cached blocks, 2 more wanted, 1 there
    computed_blocks, _ = kv.get_computed_blocks(second)
    assert kv.allocate_slots(second, 16, computed_blocks) is None
    kv.check_integrity([])


def test_own_blocks_take_over_when_the_block_they_doubled_is_evicted() -> None:
    kv = KVCacheManager(7, BLOCK)
    twins = [make_request(number, [*range(8), number]) for number in (1, 2)]
    for twin in twins:  # both computed at the same time: neither finds the other
        assert kv.allocate_slots(twin, 9) is not None
    for twin in twins:
        kv.cache_full_blocks(twin, twin.token_ids, 9)
    kv.free(twins[0])
    hog = make_request(3, [60] * 12)
    assert kv.allocate_slots(hog, 12) is not None  # evicts the first twin's blocks
    tokens = np.array([*range(8), 2, 3, 4, 5], np.int32)
    kv.cache_full_blocks(twins[1], tokens, 12)
    assert kv.get_computed_blocks(make_request(4, [*tokens.tolist(), 0]))[0] == twins[1].block_table


def test_withdrawn_blocks_are_not_found() -> None:
    kv = KVCacheManager(20, BLOCK)
    first = make_request(1, list(range(9)))
    run_prompt(kv, first)
    kv.withdraw(first)
    assert kv.get_computed_blocks(make_request(2, list(range(9)))) == ([], 0)


def test_hashes_differ_between_processes() -> None:
    assert keyed_block_hash()(b"", b"tokens") != keyed_block_hash()(b"", b"tokens")


def test_m4_a_four_bit_hash_never_gives_a_wrong_hit() -> None:
    def weak_hash(parent_digest: bytes, token_bytes: bytes) -> bytes:
        return bytes([sum(parent_digest + token_bytes) % 16])

    rng = np.random.default_rng(4)
    kv = KVCacheManager(200, BLOCK, hash_block=weak_hash)
    content_of: dict[int, list[int]] = {}  # block -> every token from the first to the block's last
    num_hits = 0
    for number in range(10_000):
        num_tokens = int(rng.integers(5, 18))
        tokens = [int(token) for token in rng.integers(0, 2, num_tokens)]
        request = make_request(number, tokens, salt=b"a" if number % 3 else b"b")
        computed_blocks, _ = kv.get_computed_blocks(request)
        for index, block_id in enumerate(computed_blocks):
            assert content_of[block_id] == [number % 3 > 0, *tokens[: (index + 1) * BLOCK]], "a wrong hit"
        num_hits += len(computed_blocks)
        run_prompt(kv, request)
        for index, block_id in enumerate(request.block_table):
            content_of[block_id] = [number % 3 > 0, *tokens[: (index + 1) * BLOCK]]
        kv.free(request)
    kv.check_integrity([])
    assert num_hits > 1000
