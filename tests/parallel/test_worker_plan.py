"""Plans as the other ranks get them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.step import Copies, JoinedRow, StepPlan, Want
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.runner.device_state import block_table_deltas, copy_to
from cb_backend.parallel.worker_plan import decode_plan, encode_plan


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def plan(*joined: JoinedRow, num_new: int = 1) -> StepPlan:
    return StepPlan(
        step_id=2**40,
        slots=ints(3, 0, 7),
        first=ints(5, 0, 9),
        num_tokens=ints(1, 4, 2),
        wants=np.array([Want.TOKENS, Want.NOTHING, Want.TOKENS], np.uint8),
        num_decode_rows=1,
        joined=joined,
        new_blocks=np.arange(3 * num_new, dtype=np.int32).reshape(-1, 3),
        copies=Copies(((1, 2), (3, 4)), ((5, 6),)),
    )


def row(**rules: object) -> JoinedRow:
    return JoinedRow(7, 2**50, np.arange(11, dtype=np.int32), 9, (4, 2), TokenRules(**rules), (1, 2), 40)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_new", [0, 1, 3])
def test_what_a_step_computes_arrives_as_it_was(num_new: int) -> None:
    sent = plan(row(), num_new=num_new)
    got, forgotten = decode_plan(encode_plan(sent))
    assert (got.adapter_loads, forgotten) == ((), ())
    for name in ("slots", "first", "num_tokens", "wants", "new_blocks"):
        there, here = getattr(sent, name), getattr(got, name)
        assert (here.dtype, here.shape, here.tolist()) == (there.dtype, there.shape, there.tolist()), name
    assert (got.step_id, got.num_decode_rows, got.copies) == (sent.step_id, sent.num_decode_rows, sent.copies)
    assert np.array_equal(block_table_deltas(got), block_table_deltas(sent))
    (there,), (here,) = sent.joined, got.joined
    assert here.token_ids.tolist() == there.token_ids.tolist()
    for name in ("slot", "request_id", "num_prompt_tokens", "block_ids", "max_total_tokens", "adapter"):
        assert getattr(here, name) == getattr(there, name), name


@pytest.mark.filterwarnings("error")
def test_torch_takes_a_steps_new_blocks_without_a_warning() -> None:
    deltas = block_table_deltas(decode_plan(encode_plan(plan(num_new=2))).plan)
    assert copy_to(deltas, torch.device("cpu")).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_plan_without_joins_is_small() -> None:
    assert len(encode_plan(plan())) < 150


@pytest.mark.parametrize(
    "followed",
    [
        {},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 5},
        {"pooling": PoolingRules(pooling="mean")},
        {"pooling": PoolingRules(readout="head", token_ids=(7, 2))},
    ],
    ids=str,
)
def test_of_the_rules_only_those_go_along_that_all_ranks_follow(followed: dict[str, Any]) -> None:
    (got,) = decode_plan(encode_plan(plan(row(temperature=0.5, seed=9, **followed)))).plan.joined
    assert got.params == TokenRules(**followed)
    assert got.stop_token_ids == ()


def test_adapters_are_called_by_their_labels() -> None:
    got, forgotten = decode_plan(encode_plan(plan(row()), ((3, b"one"), (0, b"two")), (b"three",)))
    assert got.adapter_loads == ((3, b"one"), (0, b"two"))
    assert forgotten == (b"three",)


def test_half_a_plan_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_plan(encode_plan(plan(row()))[:-3])
