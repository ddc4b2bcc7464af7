"""Model runners without a model: they obey plans exactly, so a wrong plan shows as a wrong token.

`HashRunner` (H): a KV cell holds (token, position, salt). The next token is a hash of everything that a request's
block table leads to, so a single wrong, stale or foreign block changes the output; a pooling request is given the hash
itself. `lone_output` and `lone_hash` compute the same without blocks: the reference. Of several groups of layers each
has cells of its own, of which it reads those in its window. `ScriptedRunner` (S): the test says which token comes at
each position. Both keep a request's tokens from `JoinedRow` and their own sampling only, as the real runner does.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.adapters import NO_ADAPTER, AdapterKey
from cb_backend.contracts.step import (
    HIDDEN_WANTED,
    NO_TOKEN,
    NOTHING_WANTED,
    ROW_OK,
    TOKENS_WANTED,
    JoinedRow,
    MaskSource,
    Pooled,
    RowStatus,
    StepPlan,
    StepResult,
)
from cb_backend.contracts.token_rules import TokenRules

_CELL = struct.Struct("=3q")  # (token, position, salt)
_EMPTY_CELL = _CELL.pack(-1, -1, -1)
_GARBAGE_CELL = _CELL.pack(-7, -7, -7)  # of a row that fails
GROUP_FACTOR = 1 << 40  # cells of group g hold its g-fold beside the salt
NULL_BLOCK = 0


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
            read.update(_CELL.pack(token, position, number))
        output: list[int] = []
        for position in range(len(prompt), max_total):
            token = self.next_token(read, len(output), params, stop_ids)
            output.append(token)
            if token in stop_ids and len(output) >= params.min_tokens:
                break
            read.update(_CELL.pack(token, position, number))
        return output

    def lone_hash(self, prompt: Sequence[int], salt: bytes) -> list[float]:
        """What a pooling request must be given."""
        number, read, end = salt_number(salt), self.new_hash(), len(prompt)
        for group, window in enumerate(self.windows):
            for position in range(max(0, end - window) if window else 0, end):
                read.update(_CELL.pack(prompt[position], position, number + group * GROUP_FACTOR))
        return [float(byte) for byte in read.digest()]

    def _lone_output_of_groups(
        self, prompt: Sequence[int], salt: bytes, params: TokenRules, stop_ids: Sequence[int], max_total: int
    ) -> list[int]:
        tokens = list(prompt)
        cells = [OwnCells(salt_number(salt) + group * GROUP_FACTOR) for group in range(len(self.windows))]
        while len(tokens) < max_total:
            read, end = self.new_hash(), len(tokens)
            for own, window in zip(cells, self.windows, strict=True):
                read.update(own.until(end, tokens)[max(0, end - window) * _CELL.size if window else 0 :])
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
        for position in range(len(self._cells) // _CELL.size, end):
            self._cells += _CELL.pack(tokens[position], position, self.number)
        return self._cells


@dataclass
class _Slot:
    row: JoinedRow
    tokens: list[int]
    block_table: list[int]
    has_ended: bool = False  # its last token is out: later launched steps find nothing to compute
    has_misread: bool = False
    digest: bytes = b""  # of what its last row has read
    num_summed: int = 0  # tokens whose states are in its mean
    is_broken: bool = False  # a step with it was lost: what later launched steps compute for it is garbage
    cells: list[OwnCells] = field(default_factory=list)  # by group, where there are several


@dataclass(eq=False)
class FakePending:
    """A launched step. With `is_delayed` its work is done only when its result, or a later step's, is asked for."""

    run: Callable[[], StepResult]
    written_blocks: set[int]
    read_blocks: set[int]
    undone: deque[FakePending]  # launched steps whose work has not been done, oldest first
    spoil: Callable[[], None] = lambda: None
    output: StepResult | None = None

    def result(self) -> StepResult:
        while self.output is None:
            oldest = self.undone.popleft()
            oldest.output = oldest.run()
        return self.output

    def lose(self) -> None:
        """The step never comes back, and nobody knows what it did."""
        if self in self.undone:
            self.undone.remove(self)
        self.spoil()


@dataclass
class _FakeRunner:
    """What both fakes share: slots, joins, checks of the plan, and delayed execution in order."""

    block_size: int
    is_delayed: bool = False
    slots: dict[int, _Slot] = field(default_factory=dict)
    windows: tuple[int, ...] = (0,)
    num_steps: int = 0
    num_computed: dict[int, int] = field(default_factory=dict)  # tokens computed, by request id
    # By step: requests that read cells of others. After a lost step they may, if nobody hears what comes of it.
    misread: dict[int, set[int]] = field(default_factory=dict)
    undone: deque[FakePending] = field(default_factory=deque)

    def execute(self, plan: StepPlan, masks: MaskSource) -> FakePending:
        self.num_steps += 1
        self._ask(plan, masks)
        assert plan.step_id == self.num_steps, "step ids have a gap"
        work = self._rows(plan)
        blocks, undone = self._written_blocks(work), self.undone
        read_blocks = self._read_blocks(work)
        loads = self._loads(plan)
        pending = FakePending(lambda: self._run(plan, work, loads), blocks, read_blocks, undone, lambda: _break(work))
        undone.append(pending)
        if not self.is_delayed:
            pending.result()
        return pending

    def lose(self, plan: StepPlan) -> None:
        """A plan that could not be launched: its requests are lost."""
        self.num_steps += 1
        _break(self._rows(plan))

    def _ask(self, plan: StepPlan, masks: MaskSource) -> None:
        """Ask for the masks of structured output, as the real runner does; the tokens do not depend on them."""
        joined = {row.slot: row for row in plan.joined}
        asking = [
            (slot, first + num_tokens)
            for slot, first, num_tokens, want in zip(
                *(array.tolist() for array in (plan.slots, plan.first, plan.num_tokens, plan.wants)), strict=True
            )
            if want == TOKENS_WANTED
            and (joined[slot] if slot in joined else self.slots[slot].row).params.structured_output is not None
        ]
        if asking:
            slots, positions = np.array(asking, np.int32).T
            masks.masks(slots, positions)

    def _rows(self, plan: StepPlan) -> list[tuple[_Slot, int, int, bool]]:
        """(slot state, computed, scheduled, wants anything) of each row; the plan's changes are applied."""
        joined = set()
        for row in plan.joined:
            self.slots[row.slot] = _Slot(row, row.token_ids.tolist(), list(row.block_ids))
            joined.add(row.slot)
        for grown, index, block_id in plan.new_blocks.tolist():
            assert grown not in joined, "a joining row brings its whole block table"
            table = self.slots[grown].block_table
            if index < len(table):  # promised until now
                assert len(self.windows) > 1 or self.windows[0], "a block that is there already is given again"
                assert table[index] == NULL_BLOCK, "a place in the block table is taken twice"
                table[index] = block_id
                continue
            assert len(table) == index, "new blocks must continue the block table"
            table.append(block_id)
        slots = plan.slots.tolist()
        assert len(set(slots)) == len(slots), "a slot has two rows"
        assert joined <= set(slots), "a request joined without a row"
        computed, scheduled = plan.first.tolist(), plan.num_tokens.tolist()
        is_asking, num_decode_rows = (plan.wants != NOTHING_WANTED).tolist(), plan.num_decode_rows
        assert scheduled[:num_decode_rows] == [1] * num_decode_rows, "a decode row computes one token"
        assert (plan.wants[:num_decode_rows] == TOKENS_WANTED).all(), "a decode row must sample"
        assert all(scheduled), "a row computes at least one token"
        return list(zip(map(self.slots.__getitem__, slots), computed, scheduled, is_asking, strict=True))

    def _written_blocks(self, work: list[tuple[_Slot, int, int, bool]]) -> set[int]:
        written, size = set(), len(self.windows)
        for slot, computed, scheduled, _ in work:
            first, last = computed // self.block_size, (computed + scheduled - 1) // self.block_size
            blocks = slot.block_table[first * size : (last + 1) * size]
            assert len(blocks) == (last + 1 - first) * size, "the block table has no room for the scheduled tokens"
            assert 0 not in blocks, "the null block is in a block table"
            assert written.isdisjoint(blocks), "two rows write the same block"
            written.update(blocks)
        return written

    def _read_blocks(self, work: list[tuple[_Slot, int, int, bool]]) -> set[int]:
        """Of every group, the blocks in the window of a row's first token, and of those after it."""
        read, size = set(), len(self.windows)
        for slot, computed, scheduled, _ in work:
            last = (computed + scheduled - 1) // self.block_size
            for group, window in enumerate(self.windows):
                first = max(0, computed - window + 1) // self.block_size if window else 0
                read.update(slot.block_table[first * size + group : (last + 1) * size : size])
        assert NULL_BLOCK not in read, "the null block is read"
        return read

    def _run(
        self, plan: StepPlan, work: list[tuple[_Slot, int, int, bool]], loads: dict[int, AdapterKey]
    ) -> StepResult:
        sampled: list[int] = []
        status: list[int] = []
        pooled: dict[int, bytes] = {}
        self._swap(plan, loads)
        for index, (slot, computed, scheduled, is_asking) in enumerate(work):
            end = computed + scheduled
            if slot.is_broken or slot.has_ended:
                sampled.append(0 if slot.is_broken else NO_TOKEN)
                status.append(ROW_OK if slot.is_broken else RowStatus.ENDED)
                continue
            assert end <= len(slot.tokens), "the plan runs past the known tokens"
            assert is_asking == (end == len(slot.tokens)), "what the row wants is wrong"
            is_pooling = slot.row.params.pooling is not None
            is_sampling = is_asking and not is_pooling
            if is_pooling:
                _check_pooling(slot, computed, end, is_hidden=not is_asking or plan.wants[index] == HIDDEN_WANTED)
            request_id = slot.row.request_id
            self.num_computed[request_id] = self.num_computed.get(request_id, 0) + scheduled
            token, failed = self._compute(slot, computed, end)
            if slot.has_misread:
                self.misread.setdefault(plan.step_id, set()).add(request_id)
            status.append(RowStatus.NOT_FINITE if failed else ROW_OK)
            sampled.append(token if is_sampling and not failed else NO_TOKEN)
            if is_sampling:
                slot.tokens.append(token)
                slot.has_ended = failed or self._is_last(slot, token)
            elif is_asking:
                slot.has_ended = True
                if not failed:
                    pooled[index] = slot.digest
        token_ids = np.array(sampled, np.int32)
        num_new = ((plan.wants == TOKENS_WANTED) & (token_ids != NO_TOKEN)).astype(np.uint8)
        attached = (_pooled(pooled),) if pooled else ()
        return StepResult(plan.step_id, token_ids[:, None], num_new, np.array(status, np.uint8), attached)

    def _is_last(self, slot: _Slot, token: int) -> bool:
        row, num_tokens = slot.row, len(slot.tokens)
        is_stop = token in row.stop_token_ids and num_tokens >= row.num_prompt_tokens + row.params.min_tokens
        return is_stop or num_tokens >= row.max_total_tokens

    def _compute(self, slot: _Slot, computed: int, end: int) -> tuple[int, bool]:
        raise NotImplementedError

    def _loads(self, plan: StepPlan) -> dict[int, AdapterKey]:
        """What is to be copied to slots of adapters. It is looked up when a step is launched: whoever asked for it may
        have gone, and the host have forgotten it, before the step is done.
        """
        return {}

    def _swap(self, plan: StepPlan, loads: dict[int, AdapterKey]) -> None:
        """Load adapters, and copy blocks out, then in."""

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        return b""

    def close(self) -> None:
        self.slots.clear()


def _check_pooling(slot: _Slot, computed: int, end: int, *, is_hidden: bool) -> None:
    assert is_hidden, "a pooling request has no token"
    rules = slot.row.params.pooling
    if rules is not None and rules.pooling == "mean":
        assert computed == slot.num_summed, "a mean lacks the states of some tokens"
        slot.num_summed = end


def _pooled(digests: dict[int, bytes]) -> Pooled:
    """By row; each byte is a number."""
    values = [list(digest) for digest in digests.values()]
    return Pooled(np.array(list(digests), np.int64), np.array(values, np.float32))


def _break(work: list[tuple[_Slot, int, int, bool]]) -> None:
    for slot, *_ in work:
        slot.is_broken = True


class HashRunner(_FakeRunner):
    """H. `fails_at`: request id -> number of known tokens at which its row fails (its cells are then garbage)."""

    def __init__(
        self,
        model: HashModel,
        num_blocks: int,
        block_size: int,
        salts: Mapping[int, bytes] | None = None,
        fails_at: dict[int, int] | None = None,
        is_delayed: bool = False,
        num_host_blocks: int = 0,
    ) -> None:
        super().__init__(block_size, is_delayed, windows=model.windows)
        self.model = model
        self._empty_block = _EMPTY_CELL * block_size
        # Bytes, block by block: rows write and read a few cells at a time, for which arrays are slow.
        self._blocks = [bytearray(self._empty_block) for _ in range(num_blocks)]
        self._host_blocks = [self._empty_block] * num_host_blocks
        self.salts = salts or {}  # of clients; adapters are told apart by what the slots hold
        self.adapters: Any = None  # what reads them, where there are slots for any
        self._adapter_slots: dict[int, AdapterKey] = {}
        self.fails_at = fails_at or {}

    def _loads(self, plan: StepPlan) -> dict[int, AdapterKey]:
        return {slot: self.adapters.packed_of(key).key for slot, key in plan.adapter_loads}

    def _swap(self, plan: StepPlan, loads: dict[int, AdapterKey]) -> None:
        self._adapter_slots |= loads
        for device, host in plan.copies.out:
            self._host_blocks[host] = bytes(self._blocks[device])
        for device, host in plan.copies.back:
            self._blocks[device][:] = self._host_blocks[host]
            self._host_blocks[host] = self._empty_block

    def _salt(self, row: JoinedRow) -> bytes:
        """The client's, and the adapter that is in the row's slot now."""
        own = self.salts.get(row.request_id, b"")
        return own if row.adapter == NO_ADAPTER else own + adapter_salt(self._adapter_slots.get(row.adapter, b"?"))

    def cells(self, block_ids: Sequence[int]) -> NDArray[np.int64]:
        """What is in these blocks: [num_blocks, block_size, 3] of (token, position, salt)."""
        content = b"".join([self._blocks[block_id] for block_id in block_ids])
        return np.frombuffer(content, np.int64).reshape(-1, self.block_size, 3)

    def _compute(self, slot: _Slot, computed: int, end: int) -> tuple[int, bool]:
        if self.windows != (0,):
            return self._compute_groups(slot, computed, end)
        row, size = slot.row, self.block_size
        blocks = [self._blocks[block_id] for block_id in slot.block_table]
        failed = end >= self.fails_at.get(row.request_id, end + 1)
        salt = salt_number(self._salt(row))
        for position in range(computed, end):
            token = -7 if failed else slot.tokens[position]
            _CELL.pack_into(blocks[position // size], position % size * _CELL.size, token, position, salt)
        if end < len(slot.tokens):
            return NO_TOKEN, failed
        read = self.model.new_hash()
        read.update(b"".join(blocks)[: end * _CELL.size])
        slot.digest = read.digest()
        num_out = len(slot.tokens) - row.num_prompt_tokens
        return self.model.next_token(read, num_out, row.params, row.stop_token_ids), failed

    def _compute_groups(self, slot: _Slot, computed: int, end: int) -> tuple[int, bool]:
        row, size, num_groups = slot.row, self.block_size, len(self.windows)
        failed = end >= self.fails_at.get(row.request_id, end + 1)
        salt = salt_number(self._salt(row))
        if not slot.cells or slot.cells[0].number != salt:
            slot.cells = [OwnCells(salt + group * GROUP_FACTOR) for group in range(num_groups)]
        read = self.model.new_hash()
        for group, (own, window) in enumerate(zip(slot.cells, self.windows, strict=True)):
            blocks = [self._blocks[block_id] for block_id in slot.block_table[group::num_groups]]
            expected = own.until(end, slot.tokens)
            written = _GARBAGE_CELL * end if failed else expected
            for index in range(computed // size, -(-end // size)):
                begin, until = max(computed, index * size), min(end, (index + 1) * size)
                place = slice((begin - index * size) * _CELL.size, (until - index * size) * _CELL.size)
                blocks[index][place] = written[begin * _CELL.size : until * _CELL.size]
            # Chunks that sample nothing read as well, from the window of their first token on.
            first = max(0, computed - window + 1) if window else 0
            cells = b"".join(blocks[first // size : -(-end // size)])[first % size * _CELL.size :]
            cells = cells[: (end - first) * _CELL.size]
            slot.has_misread |= not failed and cells != expected[first * _CELL.size : end * _CELL.size]
            last = max(0, end - window) if window else 0
            read.update(cells[(last - first) * _CELL.size :])
        if end < len(slot.tokens):
            return NO_TOKEN, failed
        slot.digest = read.digest()
        num_out = len(slot.tokens) - row.num_prompt_tokens
        return self.model.next_token(read, num_out, row.params, row.stop_token_ids), failed


class ScriptedRunner(_FakeRunner):
    """S. `script(request_id, n)` is the n-th generated token (from 0) of a request."""

    def __init__(
        self,
        block_size: int,
        script: Callable[[int, int], int],
        is_delayed: bool = False,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        super().__init__(block_size, is_delayed, windows=windows)
        self.script = script
        self.failing: set[int] = set()  # request ids whose rows fail from now on

    def _compute(self, slot: _Slot, computed: int, end: int) -> tuple[int, bool]:
        row = slot.row
        return self.script(row.request_id, len(slot.tokens) - row.num_prompt_tokens), row.request_id in self.failing
