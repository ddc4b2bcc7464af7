"""The prefix of a request as far as it is cached, in models of several groups of layers.

Blocks of the first group form the chain: each hangs on the one before it. The blocks of other groups hang on the same
links, one of the same content in each group, so that nothing of another prefix is ever found. This module does not
know requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from cb_backend.kv_cache.block_needs import BlockNeeds
from cb_backend.kv_cache.block_pool import NULL_BLOCK, BlockPool, CachedBlock


def group_digest(digest: bytes, group: int) -> bytes:
    """Blocks of the same content are told apart by their group; the first has the content's own digest."""
    return digest + bytes((group,)) if group else digest


class GroupPrefix:
    """A chain of rows whose blocks in the first group are cached."""

    def __init__(self, pool: BlockPool, needs: BlockNeeds, rows: Sequence[CachedBlock]) -> None:
        """`rows`: their links in the first group."""
        self._pool = pool
        self._needs = needs
        self._rows = rows
        self._known: dict[tuple[int, int], int] = {}  # by row and group

    def block_id(self, row: int, group: int) -> int:
        """The null block where none is cached."""
        known = self._known.get((row, group))
        if known is None:
            first = self._rows[row]
            link = self._pool.find(group_digest(first.digest, group), first.token_bytes, first.parent)
            known = self._known[row, group] = NULL_BLOCK if link is None else link.block_id
        return known

    def longest_usable(self) -> int:
        """Rows of the longest prefix of which every group has what is read after it. Changes nothing."""
        num_rows, needs = len(self._rows), self._needs
        for group in range(1, needs.num_whole):
            num_rows = next((row for row in range(num_rows) if not self.block_id(row, group)), num_rows)
        # From there down: a missing row rules out all prefixes whose window it is in. The group that lacked one last
        # is asked first, so that a group of which nothing is left costs one look-up a row.
        groups = list(needs.windowed)
        while num_rows:
            for group in groups:
                missing = self._last_missing(group, num_rows)
                if missing is not None:
                    num_rows = missing
                    groups.remove(group)
                    groups.insert(0, group)
                    break
            else:
                break
        return num_rows

    def _last_missing(self, group: int, num_rows: int) -> int | None:
        """Of the rows that are read after so many, the last that the group lacks."""
        first = self._needs.first_row(group, num_rows * self._needs.block_size)
        rows = range(num_rows - 1, first - 1, -1)
        return next((row for row in rows if not self.block_id(row, group)), None)

    def table(self, num_rows: int) -> list[int]:
        """The rows as a block table; the null block stands where nothing is read any more."""
        num_tokens = num_rows * self._needs.block_size
        firsts = [self._needs.first_row(group, num_tokens) for group in range(self._needs.num_groups)]
        return [
            self.block_id(row, group) if row >= first else NULL_BLOCK
            for row in range(num_rows)
            for group, first in enumerate(firsts)
        ]
