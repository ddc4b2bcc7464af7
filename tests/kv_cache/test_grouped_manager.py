"""Block tables of several groups of layers: what falls out of a window goes back, and what is found was all there."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.request import Request
from cb_backend.kv_cache.block_needs import BlockNeeds
from cb_backend.kv_cache.block_pool import NULL_BLOCK
from cb_backend.kv_cache.grouped_manager import GroupedKVCacheManager
from cb_backend.kv_cache.make_manager import make_manager
from cb_backend.kv_cache.manager import KVCacheManager
from tests.fakes.engine import info_of
from tests.kv_cache.test_kv_manager import BLOCK, make_request


def manager(num_blocks: int, *windows: int, in_flight: int | None = 8, caching: bool = True) -> GroupedKVCacheManager:
    return GroupedKVCacheManager(num_blocks + 1, BlockNeeds(windows, BLOCK, in_flight), caching)


def compute(kv: GroupedKVCacheManager, request: Request, begin: int, chunk: int = 4, end: int | None = None) -> None:
    """The prompt's tokens from `begin` on, chunk by chunk, each result read at once."""
    end = len(request.token_ids) if end is None else end
    for done in [*range(begin + chunk, end, chunk), end]:
        kv.take_rows(request, done)
        kv.cache_full_blocks(request, request.token_ids, done)
        kv._promises.check_integrity()


def start(kv: GroupedKVCacheManager, request: Request, chunk: int = 4) -> int:
    """Admit a request and compute its prompt; returns how many tokens were found."""
    found, num_found = kv.get_computed_blocks(request)
    assert kv.allocate_slots(request, len(request.token_ids), found) is not None
    compute(kv, request, num_found, chunk)
    return num_found


def column(request: Request, group: int, num_groups: int = 2) -> list[bool]:
    """Which rows have a block in the group."""
    return [block_id != NULL_BLOCK for block_id in request.block_table[group::num_groups]]


def test_a_model_without_windows_has_the_plain_manager() -> None:
    config = EngineConfig(model="m", block_size=BLOCK)
    assert type(make_manager(config, info_of(config, 9, 100, (0,)), 0)) is KVCacheManager


@pytest.mark.parametrize(("run_ahead", "chunking", "most"), [(0, True, 12), (3, True, 36), (3, False, None)])
def test_launched_steps_count_beside_the_window(run_ahead: int, chunking: bool, most: int | None) -> None:
    config = EngineConfig(
        model="m",
        block_size=BLOCK,
        max_num_batched_tokens=8,
        enable_chunked_prefill=chunking,
        enable_prefix_caching=False,
    )
    kv = make_manager(config, info_of(config, 9, 100, (0, 4)), run_ahead)
    assert isinstance(kv, GroupedKVCacheManager)
    assert (kv.num_usable_blocks, kv.num_groups, kv.enable_prefix_caching) == (9, 2, False)
    expected = BlockNeeds((0, 4), BLOCK, None if most is None else most - 4)
    assert kv.needs.most_rows == expected.most_rows


@pytest.mark.parametrize("window", [15, 16, 17])
def test_a_prompt_as_long_as_the_window(window: int) -> None:
    """16 tokens: the next sees all of them, or all but the first block's."""
    kv = manager(20, 0, window)
    request = make_request(1, list(range(16)))
    start(kv, request)
    assert column(request, 0) == [True] * 4
    assert column(request, 1) == [True] * 4
    kv.append_blocks([request])
    kv.cache_full_blocks(request, np.arange(20, dtype=np.int32), 20)
    assert column(request, 1) == [20 - window + 1 < 4, True, True, True, True]


def test_blocks_that_fall_out_of_the_window_are_free_again() -> None:
    kv = manager(40, 0, 8)
    request = make_request(1, list(range(64)))
    start(kv, request)
    assert column(request, 0) == [True] * 16
    assert column(request, 1) == [False] * 14 + [True] * 2
    assert kv.num_free_blocks == 40 - 18
    kv.check_integrity([request.block_table])
    held = kv.pool.held_blocks()
    assert sorted(kv.detach(request)) == sorted(held)


def test_a_prompt_that_has_begun_can_always_go_on() -> None:
    """Nobody else gets what it is going to take, and it never takes more than was promised."""
    kv = manager(30, 0, 8, in_flight=8)
    request = make_request(1, list(range(64)))
    assert kv.allocate_slots(request, 64) is not None
    most = kv.needs.num_blocks_for(64)
    assert kv.num_free_blocks == 30 - most
    assert kv.promised == [1]
    other = make_request(2, list(range(100, 200)))
    assert kv.allocate_slots(other, 4 * (30 - most) // 2 + 1) is None
    for done in range(4, 65, 4):
        taken = kv.take_rows(request, done)
        assert [place for place, _ in taken] == ([done // 4 * 2 - 1] if done else [])
        assert kv.num_free_blocks >= 30 - most
        kv.cache_full_blocks(request, request.token_ids, done)
        kv.check_integrity([request.block_table])
    assert kv.promised == []
    assert kv.take_rows(request, 64) == []
    kv.free(request)
    assert kv.num_free_blocks == 30


def test_a_prefix_is_found_only_where_all_of_its_window_is_there() -> None:
    """And the blocks before the window are neither needed nor touched."""
    kv = manager(60, 0, 8)
    first = make_request(1, list(range(42)))
    start(kv, first)
    kv.free(first)
    again = make_request(2, [*range(40), 77])
    found, num_found = kv.get_computed_blocks(again)
    assert num_found == 40
    assert [block != NULL_BLOCK for block in found[1::2]] == [False] * 8 + [True] * 2
    # Without the last block of the window no prefix that reads it can be used; the rest of the chain is there.
    kv.pool.withdraw([found[1 + 2 * 9]])
    assert kv.get_computed_blocks(again)[1] == 36
    kv.pool.withdraw([found[1 + 2 * 8]])
    assert kv.get_computed_blocks(again)[1] == 32
    kv.pool.withdraw([found[2 * 3]])  # of the group that keeps all
    assert kv.get_computed_blocks(again)[1] == 12
    assert kv.pool.held_blocks() == {}


@pytest.mark.parametrize("num_tokens", [15, 16, 17])
def test_hits_around_the_windows_edge(num_tokens: int) -> None:
    kv = manager(60, 0, 16)
    first = make_request(1, list(range(num_tokens)))
    start(kv, first)
    second = make_request(2, [*range(num_tokens), 90, 91, 92, 93])
    num_found = start(kv, second)
    assert num_found == num_tokens // BLOCK * BLOCK
    rows = num_found // BLOCK
    assert second.block_table[: 2 * rows : 2] == first.block_table[: 2 * rows : 2]
    kv.check_integrity([first.block_table, second.block_table])


def test_the_third_hit_is_as_right_as_the_first() -> None:
    """All that is needed is looked for before anything is touched: a hit leaves a chain as whole as it was."""
    kv = manager(24, 0, 8)
    tokens = list(range(33))
    for request_id in range(1, 5):
        request = make_request(request_id, tokens)
        found, num_found = kv.get_computed_blocks(request)
        contents = [link.token_bytes for block in found if block and (link := kv.pool.link_of(block))]
        assert len(contents) == len([block for block in found if block])
        assert num_found in (0, 32)
        assert (num_found == 32) == (request_id > 1)
        assert kv.allocate_slots(request, 33, found) is not None
        compute(kv, request, num_found)
        kv.free(request)
        assert kv.num_free_blocks == 24


def test_groups_never_find_each_others_blocks() -> None:
    kv = manager(60, 0, 8, 8)
    request = make_request(1, list(range(20)))
    start(kv, request)
    found, _ = kv.get_computed_blocks(make_request(2, [*range(20), 5]))
    held = [block for block in found if block != NULL_BLOCK]
    assert len(set(held)) == len(held) == 5 + 2 + 2
    assert found == [
        b if row * 3 + g < 3 * 5 and (g == 0 or row >= 3) else 0
        for row in range(5)
        for g, b in enumerate(request.block_table[3 * row : 3 * row + 3])
    ]


def test_what_a_prompt_gave_back_outlives_what_an_answer_did() -> None:
    """Blocks of answers go first; those of the prompt are needed by whoever begins alike."""
    kv = manager(40, 0, 8)
    prompt = list(range(32))
    request = make_request(1, prompt)
    start(kv, request)
    tokens = np.arange(72, dtype=np.int32)
    for done in range(36, 73, 4):
        kv.append_blocks([request])
        kv.cache_full_blocks(request, tokens, done)
    kv.free(request)
    num_needed = 40 - len(kv.pool.cached_blocks()) + 8  # of those that are free, eight have content
    other = make_request(2, list(range(1000, 1000 + 4 * num_needed)))
    whole = GroupedKVCacheManager.allocate_slots(kv, other, 2 * num_needed)
    assert whole is not None
    compute(kv, other, 0, end=2 * num_needed)
    assert kv.get_computed_blocks(make_request(3, [*prompt, 7]))[1] == 32


def test_a_chain_whose_first_group_gives_back_is_not_begun_anew() -> None:
    kv = manager(40, 8, 4)
    request = make_request(1, list(range(40)))
    start(kv, request)
    chain = kv._chains[1]
    assert (chain.num_blocks, chain.is_closed) == (10, False)
    kv.pool.withdraw([chain.end.block_id])  # type: ignore[union-attr]
    kv.append_blocks([request])
    kv.cache_full_blocks(request, np.arange(44, dtype=np.int32), 44)
    assert chain.is_closed
    kv.free(request)
    assert kv.num_free_blocks == 40


def test_a_chain_does_not_begin_anew_where_its_end_is_taken_by_the_request_itself() -> None:
    """Of two rows found the first is not read any more after what comes back from the host, and its block is needed."""
    kv = manager(2, 2)
    first = make_request(1, [1, 2, 3, 4])
    start(kv, first)
    kv.free(first)
    second = make_request(2, list(range(1, 12)))
    found, num_found = kv.get_computed_blocks(second)
    assert num_found == 4
    others = make_request(3, [7])
    assert kv.allocate_slots(others, 1) is not None
    kv.take_rows(others, 1)
    assert kv.allocate_slots(second, 8, found, num_computed_tokens=6) is not None
    assert found[0] in second.block_table, "the block of the row that was found"
    kv.cache_full_blocks(second, second.token_ids, 8)
    contents = {link.token_bytes for block in kv.pool.cached_blocks() if (link := kv.pool.link_of(block))}
    assert second.token_ids[4:8].tobytes() not in contents


def test_a_failed_request_takes_back_what_it_gave_back_too() -> None:
    kv = manager(60, 0, 8)
    request = make_request(1, list(range(40)))
    start(kv, request)
    assert kv.pool.num_cached_blocks > 12, "there is more than it still holds"
    kv.withdraw(request)
    assert kv.pool.num_cached_blocks == 0
    kv.free(request)
    kv.check_integrity([])


def test_blocks_that_come_back_from_the_host_are_those_of_the_window() -> None:
    kv = manager(60, 0, 8)
    request = make_request(1, list(range(30)))
    table = kv.allocate_slots(request, 30, num_computed_tokens=26)
    assert table is not None
    assert column(request, 0) == [True] * 8
    assert column(request, 1) == [False] * 4 + [True] * 3 + [False]
    assert kv.take_rows(request, 30) == [(15, request.block_table[15])]


def test_without_prefix_caching_nothing_stays_findable() -> None:
    kv = manager(40, 0, 8, caching=False)
    request = make_request(1, list(range(40)))
    start(kv, request)
    assert column(request, 1) == [False] * 8 + [True] * 2
    assert kv.pool.num_cached_blocks == 0


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_found_has_the_right_tokens(seed: int) -> None:
    """Requests that begin alike come and go in a cache too small for all; a model of what each block holds checks."""
    rng = random.Random(seed)
    windows = rng.choice(((0, 6), (0, 9, 9, 9), (0, 0, 5), (7, 3), (0, 4, 4, 4, 4, 4, 4)))
    size = len(windows)
    kv = manager(rng.randint(30, 60) * size // 2, *windows, in_flight=rng.choice((4, 9)))
    content: dict[int, tuple[int, int, bytes]] = {}  # by block: group, row, the prefix up to its end
    texts = [[rng.randrange(50) for _ in range(60)] for _ in range(2)]
    running: dict[int, Request] = {}
    num_hits = 0
    for request_id in range(150):
        tokens = rng.choice(texts)[: rng.randint(1, 60)] + [rng.randrange(50) for _ in range(rng.randint(0, 6))]
        request = make_request(request_id, tokens)
        found, num_found = kv.get_computed_blocks(request)
        prefix = request.token_ids.tobytes
        for place, block in enumerate(found):
            row, group = divmod(place, size)
            if block != NULL_BLOCK:
                assert content[block] == (group, row, prefix()[: 4 * BLOCK * (row + 1)])
            else:
                assert row < kv.needs.first_row(group, num_found)
        if kv.allocate_slots(request, len(tokens), found) is None:
            if running:
                kv.free(running.pop(rng.choice([*running])))
            continue
        num_hits += num_found > 0
        running[request_id] = request
        done = num_found
        while done < len(tokens):
            done = min(done + rng.randint(1, kv.needs.most_rows and 4), len(tokens))
            kv.take_rows(request, done)
            for place, block in enumerate(request.block_table[: -(-done // BLOCK) * size]):
                row, group = divmod(place, size)
                if block != NULL_BLOCK and row >= num_found // BLOCK:
                    content[block] = group, row, prefix()[: 4 * BLOCK * (row + 1)]
            kv.cache_full_blocks(request, request.token_ids, done)
            kv.check_integrity([other.block_table for other in running.values()])
    assert num_hits > 10
