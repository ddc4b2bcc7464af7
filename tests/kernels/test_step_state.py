"""The slot-state kernels against their twins, and the twins against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cb_backend.kernels import step_state

NUM_SLOTS, MAX_BLOCKS, BLOCK_SIZE, VOCAB = 9, 5, 4, 37
PADDING = NUM_SLOTS - 1


def _sampling(rng: np.random.Generator) -> step_state.SamplingState:
    def floats() -> torch.Tensor:
        return torch.from_numpy(rng.random(NUM_SLOTS, np.float32))

    return step_state.SamplingState(
        floats(),
        torch.from_numpy(rng.integers(0, 50, NUM_SLOTS, np.int32)),
        floats(),
        floats(),
        torch.from_numpy(rng.integers(-(2**63), 2**63, NUM_SLOTS, np.int64)),
    )


@pytest.fixture(params=["torch", "triton"])
def suffix(request: pytest.FixtureRequest) -> str:
    return "_torch" if request.param == "torch" else ""


@pytest.mark.parametrize("num_rows", [1, 3, 130])
def test_prepare_decode_gathers_by_slot(suffix: str, num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    slots = rng.integers(0, NUM_SLOTS, num_rows, np.int32)
    num_tokens = rng.integers(1, MAX_BLOCKS * BLOCK_SIZE + 1, NUM_SLOTS, np.int32)
    num_tokens[PADDING] = 0
    last_token = rng.integers(0, VOCAB, NUM_SLOTS, np.int32)
    tables = rng.integers(1, 100, (NUM_SLOTS, MAX_BLOCKS), np.int32)
    sampling = _sampling(rng)
    out = step_state.empty_decode_inputs(num_rows, torch.device("cpu"))
    for poisoned in (*out[:4], *out.sampling, out.sample_positions):
        poisoned.fill_(-7)
    getattr(step_state, "prepare_decode" + suffix)(
        torch.from_numpy(slots),
        torch.from_numpy(last_token),
        torch.from_numpy(num_tokens),
        torch.from_numpy(tables),
        sampling,
        BLOCK_SIZE,
        out,
    )
    for row, slot in enumerate(slots):
        length = int(num_tokens[slot])
        position = max(length - 1, 0)
        expected = tables[slot, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE if length else 0
        assert out.token_ids[row] == last_token[slot]
        assert out.positions[row] == position
        assert out.seq_lens[row] == length
        assert out.slot_mapping[row] == expected
        assert out.sample_positions[row] == length
        assert [values[row] for values in out.sampling] == [values[slot] for values in sampling]


def test_commit_moves_only_live_rows(suffix: str) -> None:
    last_token = torch.full((NUM_SLOTS,), 5, dtype=torch.int32)
    num_tokens = torch.full((NUM_SLOTS,), 3, dtype=torch.int32)
    num_tokens[PADDING] = 0
    slots = torch.tensor([2, 0, PADDING, PADDING], dtype=torch.int32)
    sampled = torch.tensor([11, 12, 13, 14], dtype=torch.int32)
    positions = torch.tensor([7, 3, 0, 0])
    getattr(step_state, "commit_tokens" + suffix)(slots, sampled, positions, last_token, num_tokens)
    assert last_token.tolist() == [12, 5, 11, 5, 5, 5, 5, 5, 5]
    assert num_tokens.tolist() == [4, 3, 8, 3, 3, 3, 3, 3, 0]


def test_deltas_are_written_and_padding_is_not(suffix: str) -> None:
    tables = torch.zeros(NUM_SLOTS, MAX_BLOCKS, dtype=torch.int32)
    deltas = torch.tensor([[1, 0, 42], [-1, -1, -1], [7, 4, 43], [1, 1, 44]], dtype=torch.int32)
    getattr(step_state, "apply_deltas" + suffix)(tables, deltas)
    assert tables[1].tolist() == [42, 44, 0, 0, 0]
    assert tables[7].tolist() == [0, 0, 0, 0, 43]
    assert int(tables.sum()) == 42 + 43 + 44


def test_stop_ids_are_masked_below_min_tokens_only(suffix: str) -> None:
    logits = torch.randn(4, VOCAB)
    before = logits.clone()
    slots = torch.tensor([0, 1, 2, PADDING], dtype=torch.int32)
    positions = torch.tensor([10, 10, 10, 0])
    min_positions = torch.zeros(NUM_SLOTS, dtype=torch.int32)
    min_positions[:3] = torch.tensor([11, 10, 99], dtype=torch.int32)
    stop_ids = torch.full((NUM_SLOTS, 6), -1, dtype=torch.int32)
    stop_ids[0, :2] = torch.tensor([3, VOCAB - 1], dtype=torch.int32)
    stop_ids[1, 0] = 4
    getattr(step_state, "mask_stop_ids" + suffix)(logits, slots, positions, min_positions, stop_ids)
    before[0, [3, VOCAB - 1]] = float("-inf")
    assert torch.equal(logits, before)
