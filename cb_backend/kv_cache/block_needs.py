"""How many blocks requests need where some groups of layers give back what has fallen out of their windows.

A block table is a list of *rows*, each of one block for every group, and each for `block_size` tokens. In a group with
a window only the newest rows have blocks; the others name the null block. Pure arithmetic: this module does not know
which blocks, requests or layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cb_backend.kv_cache.block_pool import NULL_BLOCK
from cb_backend.kv_cache.layout import ALL_TOKENS

# What has fallen out of a window within a prompt is kept for longer where a prefix of a multiple of so many blocks
# needs it: another prompt may begin like this one. The rest is the first to be evicted.
RETAINED_EVERY = 8
_ANY = 1 << 62


class BlockNeeds:
    """What block tables of these groups hold."""

    def __init__(self, windows: Sequence[int], block_size: int, most_in_flight: int | None) -> None:
        """`windows`: of each group, those that keep most first. `most_in_flight`: tokens of one request that launched
        steps, and the one being planned, compute at most; None: a prompt is computed at once, whatever its length."""
        self.windows = tuple(windows)
        self.block_size = block_size
        self.num_groups = len(windows)
        self.windowed = tuple(group for group, window in enumerate(windows) if window != ALL_TOKENS)
        self.num_whole = self.num_groups - len(self.windowed)
        self.is_at_once = most_in_flight is None
        # Rows of each windowed group that have blocks at most: those of the window, and those of what is on its way,
        # which begins anywhere in a block. (What has fallen out is given back when a block is full.)
        self.most_rows = {
            group: _ANY
            if most_in_flight is None
            else self.num_rows(max(windows[group], 2) - 1) + self.num_rows(block_size - 1 + most_in_flight)
            for group in self.windowed
        }

    def num_rows(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_row(self, group: int, num_computed: int) -> int:
        """The first row that is read when the token after `num_computed` is computed, or any later one.

        The row before that token is always among them: what a request is going to cache hangs on it.
        """
        window = self.windows[group]
        if window == ALL_TOKENS:
            return 0
        return max(0, num_computed - max(window, 2) + 1) // self.block_size

    def is_retained(self, group: int, row: int, num_prompt_tokens: int) -> bool:
        """Whether a prompt that begins like this one is likely to need what has fallen out of the window here."""
        if (row + 1) * self.block_size > num_prompt_tokens:
            return False
        point = -(-(row + 1) // RETAINED_EVERY) * RETAINED_EVERY  # rows of the next such prefix, this one included
        return group == 0 or row >= self.first_row(group, point * self.block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        """The most that a request of so many tokens holds at a time."""
        rows = self.num_rows(num_tokens)
        return self.num_whole * rows + sum(min(rows, self.most_rows[group]) for group in self.windowed)

    def most_tokens(self, num_blocks: int) -> int:
        """The longest request that so many blocks suffice for."""
        low, high = 0, num_blocks  # rows
        if not self.num_whole:
            # From some length on a request takes no more.
            high = max(high, *self.most_rows.values())
            if self.num_blocks_for(high * self.block_size) <= num_blocks:
                high = (1 << 30) // self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_blocks_for(middle * self.block_size) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size

    def growth(self, held: NDArray[np.float64], to_come: NDArray[np.float64], most_at_once: float) -> int:
        """Blocks for what requests are to grow. Arrays [num_requests], in tokens; `most_at_once`: tokens of all of them
        together that are held at a time. Groups with windows grow until these are full."""
        tokens = self.num_whole * most_at_once
        for group in self.windowed:
            tokens += float(np.minimum(to_come, np.maximum(self.windows[group] - held, 0.0)).sum())
        return int(tokens / self.block_size)

    def kept(self, block_table: Sequence[int], num_tokens: int) -> list[int]:
        """The rows that hold the first `num_tokens` tokens, with those blocks alone that are read when computing goes
        on after them."""
        num_rows = self.num_rows(num_tokens)
        entries = list(block_table[: num_rows * self.num_groups])
        for group in self.windowed:
            for row in range(min(self.first_row(group, num_tokens), num_rows)):
                entries[row * self.num_groups + group] = NULL_BLOCK
        return entries
