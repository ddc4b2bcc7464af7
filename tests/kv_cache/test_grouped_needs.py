"""What a manager of several groups tells of its needs, and what it notes while requests go on."""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.kv_cache.block_needs import BlockNeeds
from cb_backend.kv_cache.block_pool import NULL_BLOCK
from cb_backend.kv_cache.grouped_manager import GroupedKVCacheManager
from cb_backend.support.fault_points import armed
from tests.kv_cache.test_grouped_manager import column, compute, manager, start
from tests.kv_cache.test_kv_manager import BLOCK, make_request


def test_blocks_are_findable_unless_that_is_turned_off() -> None:
    kv = GroupedKVCacheManager(41, BlockNeeds((0, 8), BLOCK, 8))
    start(kv, make_request(1, list(range(16))))
    assert kv.get_computed_blocks(make_request(2, [*range(16), 5]))[1] == 16


@pytest.mark.parametrize("num_tokens", [41, 44, 60])
def test_what_is_missing_to_a_request_is_what_it_takes_without_what_was_found_and_is_read(num_tokens: int) -> None:
    """Ten rows are found: all of the group that keeps all, and two of the other's window."""
    kv = manager(60, 0, 8)
    first = make_request(1, list(range(42)))
    start(kv, first)
    kv.free(first)
    again = make_request(2, [*range(40), *range(100, 60 + num_tokens)])
    found, num_found = kv.get_computed_blocks(again)
    assert (num_found, len(found), found.count(NULL_BLOCK)) == (40, 20, 8)
    missing = kv.num_missing_blocks(again, num_tokens)
    assert missing == kv.num_blocks_for(num_tokens) - 12
    assert kv.num_missing_blocks(again, 4) == 0


def test_it_comes_by_its_fault_points_where_something_is_done() -> None:
    seen: list[str] = []
    kv, request = manager(30, 0, 8), make_request(1, list(range(16)))
    with armed(seen.append):
        assert kv.allocate_slots(make_request(2, list(range(1000))), 1000) is None
        assert seen == []
        assert kv.allocate_slots(request, 16) is not None
        assert seen == ["kv.allocate_slots"]
        compute(kv, request, 0, chunk=8)
        kv.append_blocks([request])
    assert seen == ["kv.allocate_slots", "kv.cache_full_blocks", "kv.cache_full_blocks", "kv.append_blocks"]


@pytest.mark.parametrize("windows", [(0, 8), (8, 4), (0, 8, 8)])
def test_a_long_answer_holds_its_windows_alone(windows: tuple[int, ...]) -> None:
    size = len(windows)
    kv, request = manager(80, *windows), make_request(1, list(range(16)))
    start(kv, request)
    tokens = np.arange(80, dtype=np.int32)
    for done in range(20, 81, 4):
        kv.append_blocks([request])
        kv.cache_full_blocks(request, tokens, done)
        for group, window in enumerate(windows):
            num_kept = window // BLOCK or done // BLOCK
            assert column(request, group, size) == [False] * (done // BLOCK - num_kept) + [True] * num_kept
        kv.check_integrity([request.block_table])


def test_who_waits_for_a_prefix_goes_on_when_it_is_there() -> None:
    kv = manager(60, 0, 8)
    first, second = make_request(1, list(range(40))), make_request(2, [*range(32), *range(50, 60)])
    assert kv.allocate_slots(first, 40) is not None
    kv.announce(first)
    assert kv.is_prefix_coming(second)
    compute(kv, first, 0, end=8)
    assert kv.is_prefix_coming(second), "the first of it is there"
    compute(kv, first, 8, end=32)
    assert not kv.is_prefix_coming(second)
    assert kv.get_computed_blocks(second)[1] == 32
    compute(kv, first, 32)
    assert not kv._coming, "nothing is coming any more"


def take_without_content(kv: GroupedKVCacheManager, and_so_many: int) -> None:
    """Blocks that nothing can be found in, and so many that something can."""
    num_plain = kv.num_free_blocks - sum(kv.pool.ref_cnt(block) == 0 for block in kv.pool.cached_blocks())
    assert kv.pool.allocate(num_plain + and_so_many) is not None


def test_what_no_prefix_is_likely_to_need_goes_before_what_others_left_earlier() -> None:
    """Of 16 rows 12 have fallen out of the window, and no prefix of eight rows reads them."""
    kv = manager(80, 0, 8)
    old, long = make_request(1, list(range(16))), make_request(2, list(range(100, 164)))
    start(kv, old)
    kv.free(old)
    start(kv, long)
    take_without_content(kv, 12)
    assert kv.get_computed_blocks(make_request(3, [*range(16), 5]))[1] == 16
    take_without_content(kv, 4)
    assert kv.get_computed_blocks(make_request(3, [*range(16), 5]))[1] < 16, "nothing else is left"


def test_what_a_prompt_gave_back_is_as_new_as_its_end() -> None:
    """The window of its first eight rows was given back long before the other request ended, and is needed longer."""
    kv = manager(100, 0, 8)
    long, other = make_request(1, list(range(100, 164))), make_request(2, list(range(16)))
    start(kv, long)
    start(kv, other)
    kv.free(other)
    kv.free(long)
    take_without_content(kv, 12 + 2 + 2)
    assert kv.get_computed_blocks(make_request(3, [*range(100, 132), 5]))[1] == 32


@pytest.mark.parametrize("caching", [True, False])
def test_full_blocks_matter_though_nothing_is_findable(caching: bool) -> None:
    """Windows give back by them."""
    assert manager(20, 0, 8, caching=caching).minds_full_blocks
