"""How many blocks a request takes where some groups of layers see a window only, counted by hand and one by one."""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.kv_cache.block_needs import RETAINED_EVERY, BlockNeeds

BLOCK = 4


def rows_read(window: int, num_computed: int) -> set[int]:
    """By the token after `num_computed`, whose own row is the last of them."""
    return {position // BLOCK for position in range(max(0, num_computed - window + 1), num_computed + 1)}


@pytest.mark.parametrize("window", [2, 3, 4, 5, 7, 8, 9, 16, 17])
def test_no_row_before_the_first_is_read_again_and_the_first_is(window: int) -> None:
    needs = BlockNeeds((0, window), BLOCK, 16)
    for num_computed in range(60):
        first = needs.first_row(1, num_computed)
        assert first == min(rows_read(window, num_computed))
        assert not any(row < first for later in range(num_computed, 80) for row in rows_read(window, later))
    assert {needs.first_row(0, num_computed) for num_computed in range(60)} == {0}


def test_the_row_before_the_next_token_is_kept_whatever_the_window() -> None:
    needs = BlockNeeds((1,), BLOCK, 16)
    assert [needs.first_row(0, num_computed) for num_computed in (0, 1, 4, 5, 8)] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("in_flight", [1, 4, 7, 40])
@pytest.mark.parametrize("window", [1, 2, 5, 8, 13])
def test_a_window_never_holds_more_rows_than_are_counted(window: int, in_flight: int) -> None:
    """However far launched steps are ahead, and though rows are given back when one is full."""
    needs = BlockNeeds((0, window), BLOCK, in_flight)
    held = [needs.num_rows(done + in_flight) - needs.first_row(1, done // BLOCK * BLOCK) for done in range(100)]
    assert max(held) <= needs.most_rows[1] <= max(held) + 1
    assert needs.num_blocks_for(7) == 2 + min(2, needs.most_rows[1])
    assert needs.num_blocks_for(400) == 100 + needs.most_rows[1]


def test_a_prompt_that_is_computed_at_once_holds_all_of_its_rows() -> None:
    needs = BlockNeeds((0, 8, 8), BLOCK, None)
    assert needs.is_at_once
    assert needs.num_blocks_for(400) == 300


@pytest.mark.parametrize("windows", [(0,), (0, 8), (0, 0, 5), (0, 6, 6, 6, 6, 6, 6), (9, 3)])
@pytest.mark.parametrize("num_blocks", [1, 2, 7, 20, 33, 100])
def test_the_longest_request_just_fits(windows: tuple[int, ...], num_blocks: int) -> None:
    needs = BlockNeeds(windows, BLOCK, 4)
    most = needs.most_tokens(num_blocks)
    assert most % BLOCK == 0
    assert needs.num_blocks_for(most) <= num_blocks
    assert most >= 1 << 29 or needs.num_blocks_for(most + 1) > num_blocks


def test_without_a_group_that_keeps_all_there_is_no_longest_request() -> None:
    needs = BlockNeeds((9, 3), BLOCK, 4)
    most = needs.num_blocks_for(1 << 20)
    assert needs.most_tokens(most) == 1 << 30, "as many as fit into the int32 that lengths are counted in"
    assert needs.most_tokens(most - 1) < 100


def test_windows_grow_until_they_are_full() -> None:
    needs = BlockNeeds((0, 8), BLOCK, 16)
    held, to_come = np.array([2.0, 6.0, 50.0]), np.array([4.0, 40.0, 40.0])
    assert needs.growth(held, to_come, 84.0) == (84 + 4 + 2 + 0) // BLOCK


def test_what_is_kept_of_a_table_is_what_is_read_on() -> None:
    needs = BlockNeeds((0, 5), BLOCK, 16)
    table = list(range(1, 13))  # six rows of two
    assert needs.kept(table, 0) == []
    assert needs.kept(table, 3) == [1, 2]
    assert needs.kept(table, 8) == [1, 0, 3, 4]
    assert needs.kept(table, 17) == [1, 0, 3, 0, 5, 0, 7, 8, 9, 10]


def test_of_a_prompt_that_is_retained_which_prefixes_of_whole_multiples_read() -> None:
    needs, prompt = BlockNeeds((0, 8), BLOCK, 16), 3 * RETAINED_EVERY * BLOCK
    retained = [row for row in range(3 * RETAINED_EVERY + 1) if needs.is_retained(1, row, prompt)]
    ends = [RETAINED_EVERY * number for number in (1, 2, 3)]
    assert retained == [row for end in ends for row in range(end - 2, end)]
    assert not needs.is_retained(1, RETAINED_EVERY - 1, RETAINED_EVERY * BLOCK - 1)


def test_of_the_group_that_the_chain_hangs_on_all_is_retained() -> None:
    needs = BlockNeeds((8, 4), BLOCK, 16)
    assert [needs.is_retained(group, 2, 12) for group in (0, 1)] == [True, False]
    assert not needs.is_retained(0, 3, 12)
