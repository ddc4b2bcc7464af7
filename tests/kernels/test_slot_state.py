"""The slot-state kernels and their twins against plain loops."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from cb_backend.contracts.step import JoinedRow, RowStatus
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.runner.device_state import MAX_STOP_IDS_PER_SLOT, joined_slots, new_slot_state
from cb_backend.kernels import sample, slot_state, step_rows
from cb_backend.kernels.row_sampling import ROW_PARAMETERS, RowSampling, neutral_rows

NUM_SLOTS, MAX_BLOCKS, BLOCK_SIZE, VOCAB = 9, 5, 4, 37
PADDING = NUM_SLOTS - 1


def _state(rng: np.random.Generator, device: torch.device) -> slot_state.SlotState:
    def floats() -> torch.Tensor:
        return torch.from_numpy(rng.random(NUM_SLOTS, np.float32)).to(device)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(low, high, (NUM_SLOTS, *shape), np.int32)).to(device)

    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63, NUM_SLOTS, np.int64)).to(device)
    of_type = {torch.float32: floats, torch.int32: lambda: ints(0, 50), torch.int64: lambda: seeds}
    state = slot_state.SlotState(
        last_token=ints(0, VOCAB),
        num_tokens=ints(1, MAX_BLOCKS * BLOCK_SIZE + 1),
        num_prompt_tokens=ints(1, 9),
        block_tables=ints(1, 100, MAX_BLOCKS),
        sampling=RowSampling(of_type[row.dtype]() for row in ROW_PARAMETERS.values()),
        min_positions=ints(0, 9),
        max_total_tokens=ints(100, 200),
        adapter=ints(-1, 4),
        stop_ids=ints(-1, VOCAB, 6),
    )
    state.num_tokens[PADDING] = 0
    return state


def _rows(num_rows: int, num_decode: int, device: torch.device) -> step_rows.StepRows:
    def poison(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((size,), -7, dtype=dtype, device=device)

    i32 = torch.int32
    sampling = RowSampling(poison(num_rows, row.dtype) for row in ROW_PARAMETERS.values())
    return step_rows.StepRows(
        *(poison(num_decode + 2, i32) for _ in range(4)),
        poison(num_decode, i32),
        sampling,
        poison(num_rows, torch.int64),
    )


@pytest.fixture(params=["torch", "triton"])
def suffix(request: pytest.FixtureRequest) -> str:
    return "_torch" if request.param == "torch" else ""


@pytest.mark.parametrize(("num_rows", "num_decode"), [(3, 3), (7, 4), (140, 130)])
@pytest.mark.parametrize("num_groups", [2, 7])
def test_prepare_rows_finds_cells_in_the_tables_of_every_group(
    suffix: str, num_groups: int, num_rows: int, num_decode: int, device: torch.device
) -> None:
    rng = np.random.default_rng(num_rows)
    slots = rng.integers(0, NUM_SLOTS, num_rows, np.int32)
    tables = torch.from_numpy(rng.integers(1, 100, (num_groups * NUM_SLOTS, MAX_BLOCKS), np.int32)).to(device)
    mapping = torch.full((num_groups, num_decode + 3), -7, dtype=torch.int32, device=device)
    state = _state(rng, device)._replace(block_tables=tables)
    out = _rows(num_rows, num_decode, device)._replace(slot_mapping=mapping)
    getattr(step_rows, "prepare_rows" + suffix)(torch.from_numpy(slots).to(device), num_decode, state, BLOCK_SIZE, out)
    for group in range(num_groups):
        for row, slot in enumerate(slots[:num_decode]):
            length = int(state.num_tokens[slot])
            block = tables[group * NUM_SLOTS + int(slot), max(length - 1, 0) // BLOCK_SIZE]
            assert mapping[group, row] == (block * BLOCK_SIZE + (length - 1) % BLOCK_SIZE if length else 0)
    assert (mapping[:, num_decode:] == -7).all()


@pytest.mark.parametrize(("num_rows", "num_decode"), [(1, 1), (3, 3), (7, 4), (5, 0), (140, 130)])
def test_prepare_rows_gathers_by_slot(suffix: str, num_rows: int, num_decode: int, device: torch.device) -> None:
    rng = np.random.default_rng(num_rows)
    slots = rng.integers(0, NUM_SLOTS, num_rows, np.int32)
    state, out = _state(rng, device), _rows(num_rows, num_decode, device)
    getattr(step_rows, "prepare_rows" + suffix)(torch.from_numpy(slots).to(device), num_decode, state, BLOCK_SIZE, out)
    for row, slot in enumerate(slots):
        length = int(state.num_tokens[slot])
        assert out.sample_positions[row] == length
        assert [values[row] for values in out.sampling] == [values[slot] for values in state.sampling]
        if row >= num_decode:
            continue
        position = max(length - 1, 0)
        cell = state.block_tables[slot, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        assert out.token_ids[row] == state.last_token[slot]
        assert out.positions[row] == position
        assert out.seq_lens[row] == length
        assert out.slot_mapping[row] == (cell if length else 0)
        assert out.num_prompt_tokens[row] == state.num_prompt_tokens[slot]
    for values in out[:4]:  # what lies behind the decode rows belongs to the prompts
        assert values[num_decode:].tolist() == [-7, -7]


def test_joining_writes_the_slot_and_no_other(suffix: str, device: torch.device) -> None:
    state, before = (_state(np.random.default_rng(1), device) for _ in range(2))
    params = TokenRules(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=2**63 + 12345, min_tokens=3)
    rows = [
        JoinedRow(2, 0, np.array([4, 5, 6], np.int32), 2, (1,), params, (9, 11), 18, adapter=3),
        JoinedRow(5, 1, np.array([8], np.int32), 1, (2,), TokenRules(temperature=0.0, seed=7), (), 17),
    ]
    stop_ids = torch.zeros(NUM_SLOTS, MAX_STOP_IDS_PER_SLOT, dtype=torch.int32, device=device)
    state = state._replace(stop_ids=stop_ids)
    getattr(slot_state, "join_slots" + suffix)(torch.from_numpy(joined_slots(rows)).to(device), state)
    assert [state.last_token[2], state.num_tokens[2], state.num_prompt_tokens[2]] == [6, 3, 2]
    assert [state.min_positions[2], state.max_total_tokens[2], state.max_total_tokens[5]] == [5, 18, 17]
    assert [int(state.adapter[2]), int(state.adapter[5])] == [3, -1]
    assert [round(float(values[2]), 6) for values in state.sampling[:4]] == [0.7, 5, 0.9, 0.1]
    assert np.int64(int(state.sampling.seed[2])).astype(np.uint64) == 2**63 + 12345
    assert state.stop_ids[2, :3].tolist() == [9, 11, -1]
    assert [state.last_token[5], state.num_tokens[5], state.sampling.seed[5]] == [8, 1, 7]
    assert state.sampling.temperature[5] == 0.0
    others = [slot for slot in range(NUM_SLOTS) if slot not in (2, 5)]
    for now, then in zip(state.joined, before.joined, strict=True):
        assert torch.equal(now[others], then[others])


@pytest.mark.parametrize("name", ROW_PARAMETERS)
def test_each_row_parameter_goes_its_way_from_the_request_to_the_row(
    suffix: str, name: str, device: torch.device
) -> None:
    """Joined, gathered by slot, and neutral where nobody has joined."""
    plain = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "seed": 2**64 - 5}
    params = TokenRules(**plain)  # type: ignore[arg-type]
    state = new_slot_state(NUM_SLOTS - 1, MAX_BLOCKS, device)
    joined = joined_slots([JoinedRow(3, 0, np.array([4], np.int32), 1, (1,), params, (), 9)])
    getattr(slot_state, "join_slots" + suffix)(torch.from_numpy(joined).to(device), state)
    out = _rows(3, 3, device)
    slots = torch.tensor([3, PADDING, 0], dtype=torch.int32, device=device)
    getattr(step_rows, "prepare_rows" + suffix)(slots, 3, state, BLOCK_SIZE, out)
    row = ROW_PARAMETERS[name]
    assert row.read(params) != row.neutral
    assert getattr(out.sampling, name).tolist() == [row.read(params), row.neutral, row.neutral]
    assert getattr(out.sampling, name).dtype == row.dtype


@pytest.mark.parametrize("kernel", [sample._bound_kernel, sample._choose_kernel])
def test_row_parameters_are_the_samplers_arguments_in_order(kernel: Any) -> None:
    arguments = list(inspect.signature(kernel.fn).parameters)
    wanted = ["logits", *ROW_PARAMETERS, "positions"]
    assert arguments[: len(wanted)] == [f"{name}_ptr" for name in wanted]


def test_no_other_row_parameter_can_be_asked_for() -> None:
    with pytest.raises(AttributeError, match="there is no row-wise parameter 'seeds'; there are temperature, top_k, "):
        neutral_rows(1, torch.device("cpu")).seeds  # noqa: B018


@pytest.mark.parametrize("min_tokens", [0, 7, 2**30, 2**31 - 1])
def test_the_longest_min_tokens_fits_its_column(min_tokens: int) -> None:
    """With a prompt in front of it the greatest value would not: a step must not fail for it."""
    params = TokenRules(max_tokens=2**31 - 1, min_tokens=min_tokens)
    row = JoinedRow(0, 0, np.arange(5, dtype=np.int32), 5, (), params, (9,), 100)
    values = joined_slots([row])[:, : slot_state.NUM_JOINED_WORDS].view(slot_state.JOINED_VALUES)
    assert values["min_positions"].item() == 5 + min(min_tokens, 2**30)


OK, NOT_FINITE, ENDED = RowStatus.OK, RowStatus.NOT_FINITE, RowStatus.ENDED


def commit(
    suffix: str, state: slot_state.SlotState, rows: list[tuple[int, int, int, bool]], min_positions: torch.Tensor
) -> list[list[int]]:
    """Book (slot, position, token, is failed) of each row; returns what the host reads."""
    device = state.last_token.device
    slots, positions, tokens, is_failed = (torch.tensor(column, device=device) for column in zip(*rows, strict=True))
    result = torch.full((2, len(rows)), -7, dtype=torch.int32, device=device)
    arguments = (slots.int(), tokens.int(), is_failed, positions, min_positions, state, result)
    getattr(step_rows, "commit_tokens" + suffix)(*arguments)
    return result.tolist()


def test_commit_moves_only_live_rows(suffix: str, device: torch.device) -> None:
    state = new_slot_state(PADDING, MAX_BLOCKS, device)
    state.last_token[:], state.num_tokens[:PADDING] = 5, 3
    rows = [(2, 7, 11, False), (0, 3, 12, False), (PADDING, 0, 13, False), (PADDING, 0, 14, True)]
    result = commit(suffix, state, rows, state.min_positions)
    assert result == [[11, 12, 13, 14], [OK, OK, ENDED, ENDED]]
    assert state.last_token.tolist() == [12, 5, 11, 5, 5, 5, 5, 5, 5]
    assert state.num_tokens.tolist() == [4, 3, 8, 3, 3, 3, 3, 3, 0]


def test_commit_ends_a_slot_at_its_last_token(suffix: str, device: torch.device) -> None:
    """At a stop id that may come, at the limit, and where the row failed; from then on it is padding."""
    state = new_slot_state(PADDING, MAX_BLOCKS, device)
    state.stop_ids[1, :2] = torch.tensor([30, 31], dtype=torch.int32)
    state.stop_ids[2, 0] = 30
    state.stop_ids[3, state.stop_ids.shape[1] - 1] = 33
    state.stop_ids[5, 0] = 0  # an id like any other
    state.min_positions[2] = 9
    state.max_total_tokens[4] = 8
    rows = [
        (1, 7, 31, False),
        (2, 7, 30, False),
        (3, 7, 33, False),
        (4, 7, 30, False),
        (5, 7, 0, True),
        (6, 7, 30, False),
    ]
    assert commit(suffix, state, rows, state.min_positions)[1] == [OK, OK, OK, OK, NOT_FINITE, OK]
    assert state.num_tokens[1:7].tolist() == [0, 8, 0, 0, 0, 8]
    again = [(slot, int(state.num_tokens[slot]), 20, False) for slot in range(1, 7)]
    assert commit(suffix, state, again, state.min_positions)[1] == [ENDED, OK, ENDED, ENDED, ENDED, OK]
    assert state.num_tokens[1:7].tolist() == [0, 9, 0, 0, 0, 9]
    assert state.last_token[1:7].tolist() == [31, 20, 33, 30, 0, 20]


def test_the_second_booking_of_a_step_decides_whether_a_row_has_ended(suffix: str, device: torch.device) -> None:
    """Rows with rules sample again, from the same position: the first token is thrown away, and its end with it."""
    state = new_slot_state(PADDING, MAX_BLOCKS, device)
    state.stop_ids[:PADDING, 0] = 30
    state.num_tokens[:PADDING] = 7
    rows = [(slot, 7, token, False) for slot, token in ((0, 30), (1, 9), (2, 30), (3, 9))]
    commit(suffix, state, rows, state.min_positions)
    assert state.num_tokens[:4].tolist() == [0, 8, 0, 8]
    own_min_positions = torch.zeros_like(state.min_positions)
    own_min_positions[2] = 9  # at position 7 the eighth token: a stop id does not end the row yet
    rows = [(slot, 7, token, False) for slot, token in ((0, 9), (1, 30), (2, 30), (3, 9))]
    commit(suffix, state, rows, own_min_positions)
    assert state.num_tokens[:4].tolist() == [8, 0, 8, 8]
    assert state.last_token[:4].tolist() == [9, 30, 30, 9]


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 140])
def test_commit_books_many_rows(suffix: str, num_rows: int, device: torch.device) -> None:
    state = new_slot_state(num_rows, MAX_BLOCKS, device)
    state.stop_ids[:, 1] = 3
    rows = [(slot, 1 + slot % 5, slot % 7, False) for slot in range(num_rows)]
    assert commit(suffix, state, rows, state.min_positions) == [[row[2] for row in rows], [OK] * num_rows]
    assert state.num_tokens.tolist() == [*(0 if token == 3 else at + 1 for _, at, token, _ in rows), 0]


def test_deltas_are_written_and_padding_is_not(suffix: str, device: torch.device) -> None:
    tables = torch.zeros(NUM_SLOTS, MAX_BLOCKS, dtype=torch.int32, device=device)
    deltas = torch.tensor([[1, 0, 42], [-1, -1, -1], [7, 4, 43], [1, 1, 44]], dtype=torch.int32, device=device)
    getattr(slot_state, "apply_deltas" + suffix)(tables, deltas)
    assert tables[1].tolist() == [42, 44, 0, 0, 0]
    assert tables[7].tolist() == [0, 0, 0, 0, 43]
    assert int(tables.sum()) == 42 + 43 + 44


def test_stop_ids_are_masked_below_min_tokens_only(suffix: str, device: torch.device) -> None:
    logits = torch.randn(4, VOCAB, device=device)
    before = logits.clone()
    slots = torch.tensor([0, 1, 2, PADDING], dtype=torch.int32, device=device)
    positions = torch.tensor([10, 10, 10, 0], device=device)
    min_positions = torch.zeros(NUM_SLOTS, dtype=torch.int32, device=device)
    min_positions[:3] = torch.tensor([11, 10, 99], dtype=torch.int32)
    stop_ids = torch.full((NUM_SLOTS, 6), -1, dtype=torch.int32, device=device)
    stop_ids[0, :2] = torch.tensor([3, VOCAB - 1], dtype=torch.int32)
    stop_ids[1, 0] = 4
    getattr(step_rows, "mask_stop_ids" + suffix)(logits, slots, positions, min_positions, stop_ids)
    before[0, [3, VOCAB - 1]] = float("-inf")
    assert torch.equal(logits, before)
