"""Model runners without a model: they obey plans exactly, so a wrong plan shows as a wrong token.

`HashRunner` (H): a KV cell holds (token, position, salt). The next token is a hash of everything that a request's
block table leads to, so a single wrong, stale or foreign block changes the output. `lone_output` computes the same
without blocks: the reference. `ScriptedRunner` (S): the test says which token comes at each position.
Both keep a request's tokens from `JoinedRow` and their own sampling only, as the real runner does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cb_backend.outputs import NO_TOKEN, JoinedRow, ModelRunnerOutput, SchedulerOutput
from cb_backend.sampling_params import SamplingParams

EMPTY_CELL = (-1, -1, -1)


def salt_number(salt: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(salt, digest_size=4).digest(), "little")


@dataclass
class HashModel:
    """The deterministic next-token rule. With `stop_chance` the hash draws the first stop id instead of a token."""

    vocab_size: int
    stop_chance: float = 0.0

    def next_token(
        self, cells: NDArray[np.int64], num_out: int, params: SamplingParams, stop_ids: Sequence[int]
    ) -> int:
        """`cells` [num_tokens, 3] as read from the cache; `num_out` tokens have been generated before this one."""
        value = int.from_bytes(hashlib.blake2b(cells.tobytes(), digest_size=8).digest(), "little")
        is_masked = num_out < params.min_tokens
        if stop_ids and not is_masked and (value >> 32) % 10_000 < self.stop_chance * 10_000:
            return stop_ids[0]
        token = value % self.vocab_size
        while is_masked and token in stop_ids:
            token = (token + 1) % self.vocab_size
        return token

    def lone_output(
        self, prompt: Sequence[int], salt: bytes, params: SamplingParams, stop_ids: Sequence[int], max_total: int
    ) -> list[int]:
        """What the request must produce whatever runs beside it: the token ids of its whole output."""
        cells = np.empty((max_total, 3), np.int64)
        cells[:, 1], cells[:, 2] = np.arange(max_total), salt_number(salt)
        cells[: len(prompt), 0] = prompt
        for n in range(len(prompt), max_total):
            token = self.next_token(cells[:n], n - len(prompt), params, stop_ids)
            cells[n, 0] = token
            if token in stop_ids and n + 1 - len(prompt) >= params.min_tokens:
                return cells[len(prompt) : n + 1, 0].tolist()
        return cells[len(prompt) :, 0].tolist()


@dataclass
class _Slot:
    row: JoinedRow
    tokens: list[int]
    block_table: list[int]
    is_broken: bool = False  # a step with it was lost: what later launched steps compute for it is garbage


@dataclass
class FakePending:
    """A launched step. With `is_delayed` the work itself is done only when the result is asked for."""

    run: Callable[[], ModelRunnerOutput]
    written_blocks: set[int]
    lose: Callable[[], None] = lambda: None  # the step never comes back, and nobody knows what it did
    output: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        if self.output is None:
            self.output = self.run()
        return self.output


@dataclass
class _FakeRunner:
    """What both fakes share: slots, joins, checks of the plan, and delayed execution in order."""

    block_size: int
    is_delayed: bool = False
    slots: dict[int, _Slot] = field(default_factory=dict)
    num_steps: int = 0
    num_computed: dict[int, int] = field(default_factory=dict)  # tokens computed, by request id

    def execute_model(self, plan: SchedulerOutput) -> FakePending:
        self.num_steps += 1
        assert plan.step_id == self.num_steps, "step ids have a gap"
        work = self._rows(plan)
        pending = FakePending(lambda: self._run(plan, work), self._written_blocks(work), lambda: _break(work))
        if not self.is_delayed:
            pending.result()
        return pending

    def lose(self, plan: SchedulerOutput) -> None:
        """A plan that could not be launched: its requests are lost."""
        self.num_steps += 1
        _break(self._rows(plan))

    def _rows(self, plan: SchedulerOutput) -> list[tuple[_Slot, int, int, bool]]:
        """(slot state, computed, scheduled, is_sampling) of each row; the plan's changes are applied."""
        joined = set()
        for row in plan.joined:
            self.slots[row.slot] = _Slot(row, row.token_ids.tolist(), list(row.block_ids))
            joined.add(row.slot)
        for grown, index, block_id in plan.new_blocks.tolist():
            assert grown not in joined, "a joining row brings its whole block table"
            table = self.slots[grown].block_table
            assert len(table) == index, "new blocks must continue the block table"
            table.append(block_id)
        slots = plan.slots.tolist()
        assert len(set(slots)) == len(slots), "a slot has two rows"
        assert joined <= set(slots), "a request joined without a row"
        assert plan.num_scheduled_tokens[: plan.num_decode_rows].tolist() == [1] * plan.num_decode_rows
        assert plan.is_sampling[: plan.num_decode_rows].all(), "a decode row must sample"
        columns = (plan.num_computed_tokens.tolist(), plan.num_scheduled_tokens.tolist(), plan.is_sampling.tolist())
        return [(self.slots[slot], *rest) for slot, *rest in zip(slots, *columns, strict=True)]

    def _written_blocks(self, work: list[tuple[_Slot, int, int, bool]]) -> set[int]:
        written = set()
        for slot, computed, scheduled, _ in work:
            first, last = computed // self.block_size, (computed + scheduled - 1) // self.block_size
            blocks = slot.block_table[first : last + 1]
            assert len(blocks) == last + 1 - first, "the block table has no room for the scheduled tokens"
            assert 0 not in blocks, "the null block is in a block table"
            assert written.isdisjoint(blocks), "two rows write the same block"
            written.update(blocks)
        return written

    def _run(self, plan: SchedulerOutput, work: list[tuple[_Slot, int, int, bool]]) -> ModelRunnerOutput:
        sampled = np.full(plan.num_rows, NO_TOKEN, np.int32)
        is_failed = np.zeros(plan.num_rows, np.bool_)
        self._swap(plan)
        for index, (slot, computed, scheduled, is_sampling) in enumerate(work):
            end = computed + scheduled
            if slot.is_broken:
                sampled[index] = 0
                continue
            assert end <= len(slot.tokens), "the plan runs past the known tokens"
            assert is_sampling == (end == len(slot.tokens)), "is_sampling is wrong"
            request_id = slot.row.request_id
            self.num_computed[request_id] = self.num_computed.get(request_id, 0) + scheduled
            token, failed = self._compute(slot, computed, end)
            is_failed[index] = failed
            if is_sampling:
                sampled[index] = token
                slot.tokens.append(token)
        return ModelRunnerOutput(plan.step_id, sampled, is_failed)

    def _compute(self, slot: _Slot, computed: int, end: int) -> tuple[int, bool]:
        raise NotImplementedError

    def _swap(self, plan: SchedulerOutput) -> None:
        """Copy blocks out, then in."""

    def prefix_cache_key(self, num_prompt_tokens: int) -> bytes:
        return b""

    def close(self) -> None:
        self.slots.clear()


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
        salts: dict[int, bytes] | None = None,
        fails_at: dict[int, int] | None = None,
        is_delayed: bool = False,
        num_host_blocks: int = 0,
    ) -> None:
        super().__init__(block_size, is_delayed)
        self.model = model
        self.host_cells = np.full((num_host_blocks, block_size, 3), EMPTY_CELL, np.int64)
        self.cells = np.full((num_blocks, block_size, 3), EMPTY_CELL, np.int64)
        self.salts = salts or {}
        self.fails_at = fails_at or {}

    def _swap(self, plan: SchedulerOutput) -> None:
        for device, host in plan.swap_out:
            self.host_cells[host] = self.cells[device]
        for device, host in plan.swap_in:
            self.cells[device] = self.host_cells[host]
            self.host_cells[host] = EMPTY_CELL

    def _compute(self, slot: _Slot, computed: int, end: int) -> tuple[int, bool]:
        row = slot.row
        positions = np.arange(end)
        block_ids = np.array(slot.block_table)[positions // self.block_size]
        offsets = positions % self.block_size
        failed = end >= self.fails_at.get(row.request_id, end + 1)
        written = slice(computed, end)
        tokens = np.array(slot.tokens[written])
        self.cells[block_ids[written], offsets[written], 0] = -7 if failed else tokens
        self.cells[block_ids[written], offsets[written], 1] = positions[written]
        self.cells[block_ids[written], offsets[written], 2] = salt_number(self.salts.get(row.request_id, b""))
        if end < len(slot.tokens):
            return NO_TOKEN, failed
        cells = self.cells[block_ids, offsets]
        num_out = len(slot.tokens) - row.num_prompt_tokens
        return self.model.next_token(cells, num_out, row.params, row.stop_token_ids), failed


class ScriptedRunner(_FakeRunner):
    """S. `script(request_id, n)` is the n-th generated token (from 0) of a request."""

    def __init__(self, block_size: int, script: Callable[[int, int], int], is_delayed: bool = False) -> None:
        super().__init__(block_size, is_delayed)
        self.script = script
        self.failing: set[int] = set()  # request ids whose rows fail from now on

    def _compute(self, slot: _Slot, computed: int, end: int) -> tuple[int, bool]:
        row = slot.row
        return self.script(row.request_id, len(slot.tokens) - row.num_prompt_tokens), row.request_id in self.failing
