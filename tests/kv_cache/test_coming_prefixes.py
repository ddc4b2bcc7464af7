"""Blocks that another request is computing: when they are worth waiting for, and when they are not coming any more."""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.contracts.request import Request
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.kv_cache.block_pool import keyed_block_hash
from cb_backend.kv_cache.manager import KVCacheManager

BLOCK = 4
SHARED = list(range(16))  # four blocks


def make_request(request_id: int, tokens: list[int], params: TokenRules | None = None) -> Request:
    total = len(tokens) + 32
    return Request(request_id, np.array(tokens, np.int32), len(tokens), params or TokenRules(), (), total)


def start(kv: KVCacheManager, request: Request) -> None:
    assert kv.allocate_slots(request, len(request.token_ids)) is not None
    kv.announce(request)


@pytest.fixture
def kv() -> KVCacheManager:
    manager = KVCacheManager(100, BLOCK)
    start(manager, make_request(1, [*SHARED, *range(70, 170)]))
    return manager


@pytest.mark.parametrize(
    ("tokens", "is_waiting"),
    [
        ([*SHARED, 0], True),
        (SHARED, False),  # its last token is computed in any case, and with it the fourth block
        ([*SHARED[:15], 0, 0], False),
        ([*SHARED, *[9] * 49], True),  # four blocks of sixteen: a quarter
        ([*SHARED, *[9] * 52], True),
        ([*SHARED, *[9] * 53], False),  # four of seventeen
    ],
)
def test_four_blocks_and_a_quarter_are_worth_waiting_for(
    kv: KVCacheManager, tokens: list[int], is_waiting: bool
) -> None:
    assert kv.is_prefix_coming(make_request(2, tokens)) is is_waiting


def test_who_needs_its_whole_prompt_computed_neither_finds_blocks_nor_waits_for_them(kv: KVCacheManager) -> None:
    whole = TokenRules(prompt_logprobs=0)
    assert not kv.is_prefix_coming(make_request(2, [*SHARED, 0], whole))
    other = make_request(3, [*range(40, 56), 0])
    start(kv, other)
    kv.cache_full_blocks(other, other.token_ids, 17)
    assert kv.get_computed_blocks(make_request(4, [*range(40, 56), 1], whole)) == ([], 0)
    assert kv.get_computed_blocks(make_request(5, [*range(40, 56), 1]))[1] == 16


def test_what_was_computed_and_withdrawn_is_not_waited_for() -> None:
    kv = KVCacheManager(100, BLOCK)
    first = make_request(1, [*SHARED, 0])
    start(kv, first)
    kv.cache_full_blocks(first, first.token_ids, 17)
    kv.withdraw(first)
    assert not kv.is_prefix_coming(make_request(2, [*SHARED, 1]))


def test_the_next_turn_finds_what_an_announced_request_generated() -> None:
    kv = KVCacheManager(100, BLOCK)
    first = make_request(1, list(range(6)))
    assert kv.allocate_slots(first, 13) is not None
    kv.announce(first)
    known = np.arange(13, dtype=np.int32)
    kv.cache_full_blocks(first, known, 13)
    assert kv.get_computed_blocks(make_request(2, [*known.tolist(), 5]))[0] == first.block_table[:3]


def test_who_starts_again_after_a_reset_leaves_blocks_to_find() -> None:
    kv = KVCacheManager(100, BLOCK)
    request = make_request(1, [*SHARED, 0])
    start(kv, request)
    kv.reset_prefix_cache()
    kv.free(request)  # preempted
    start(kv, request)
    kv.cache_full_blocks(request, request.token_ids, 17)
    assert kv.get_computed_blocks(make_request(2, [*SHARED, 1]))[1] == 16


def test_nobody_waits_for_what_was_begun_before_a_reset(kv: KVCacheManager) -> None:
    kv.reset_prefix_cache()
    assert not kv.is_prefix_coming(make_request(2, [*SHARED, 0]))


def test_digests_have_128_bits() -> None:
    assert len(keyed_block_hash()(b"", b"tokens")) == 16
