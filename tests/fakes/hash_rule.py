"""The next-token rule of runner H, and what a request must produce by it, computed without blocks: the reference.

A KV cell holds (token, position, salt). The next token is a hash of everything that a request's block table leads to,
so a single wrong, stale or foreign block changes the output.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.token_rules import TokenRules

CELL = struct.Struct("=3q")  # (token, position, salt)
EMPTY_CELL = CELL.pack(-1, -1, -1)
GARBAGE_CELL = CELL.pack(-7, -7, -7)  # of a row that fails
GROUP_FACTOR = 1 << 40  # cells of group g hold its g-fold beside the salt


@cache
def salt_number(salt: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(salt, digest_size=4).digest(), "little")


def adapter_salt(key: AdapterKey) -> bytes:
    """What an adapter adds to the salt of those who use it, as `engine.adapters` has it; nothing without one."""
    return b"lora" + key if key else b""


@dataclass
class HashModel:
    """The deterministic next-token rule. With `stop_chance` the hash draws the first stop id instead of a token."""

    vocab_size: int
    stop_chance: float = 0.0
    windows: tuple[int, ...] = (0,)  # newest cells that each group of layers reads; 0: all

    @staticmethod
    def new_hash() -> hashlib.blake2b:
        """Feed it the cells as read from the cache."""
        return hashlib.blake2b(digest_size=8)

    def next_token(self, read: hashlib.blake2b, num_out: int, params: TokenRules, stop_ids: Sequence[int]) -> int:
        """`read` is the hash of everything read; `num_out` tokens have been generated before this one."""
        value = int.from_bytes(read.digest(), "little")
        is_masked = num_out < params.min_tokens
        if stop_ids and not is_masked and (value >> 32) % 10_000 < self.stop_chance * 10_000:
            return stop_ids[0]
        token = value % self.vocab_size
        while is_masked and token in stop_ids:
            token = (token + 1) % self.vocab_size
        return token

    def lone_output(
        self, prompt: Sequence[int], salt: bytes, params: TokenRules, stop_ids: Sequence[int], max_total: int
    ) -> list[int]:
        """What the request must produce whatever runs beside it: the token ids of its whole output."""
        if self.windows != (0,):
            return self._lone_output_of_groups(prompt, salt, params, stop_ids, max_total)
        number, read = salt_number(salt), self.new_hash()
        for position, token in enumerate(prompt):
            read.update(CELL.pack(token, position, number))
        output: list[int] = []
        for position in range(len(prompt), max_total):
            token = self.next_token(read, len(output), params, stop_ids)
            output.append(token)
            if token in stop_ids and len(output) >= params.min_tokens:
                break
            read.update(CELL.pack(token, position, number))
        return output

    def lone_hash(self, prompt: Sequence[int], salt: bytes) -> list[float]:
        """What a pooling request must be given."""
        number, read, end = salt_number(salt), self.new_hash(), len(prompt)
        for group, window in enumerate(self.windows):
            for position in range(max(0, end - window) if window else 0, end):
                read.update(CELL.pack(prompt[position], position, number + group * GROUP_FACTOR))
        return [float(byte) for byte in read.digest()]

    def _lone_output_of_groups(
        self, prompt: Sequence[int], salt: bytes, params: TokenRules, stop_ids: Sequence[int], max_total: int
    ) -> list[int]:
        tokens = list(prompt)
        cells = [OwnCells(salt_number(salt) + group * GROUP_FACTOR) for group in range(len(self.windows))]
        while len(tokens) < max_total:
            read, end = self.new_hash(), len(tokens)
            for own, window in zip(cells, self.windows, strict=True):
                read.update(own.until(end, tokens)[max(0, end - window) * CELL.size if window else 0 :])
            num_out = len(tokens) - len(prompt)
            tokens.append(self.next_token(read, num_out, params, stop_ids))
            if tokens[-1] in stop_ids and num_out + 1 >= params.min_tokens:
                break
        return tokens[len(prompt) :]


class OwnCells:
    """What the cells of one request hold in one group of layers, if nothing goes wrong. Grows with its tokens."""

    def __init__(self, number: int) -> None:
        """`number` stands for the salt and the group."""
        self.number = number
        self._cells = bytearray()

    def until(self, end: int, tokens: Sequence[int]) -> bytearray:
        """The cells of the first `end` tokens, or of more: those that were asked for before."""
        for position in range(len(self._cells) // CELL.size, end):
            self._cells += CELL.pack(tokens[position], position, self.number)
        return self._cells
