"""What of a step's plan the ranks need that neither decide nor sample, as bytes: who joins, which tokens, which blocks.

How a request samples stays with rank 0; of its rules only those go along for which all ranks compute something. Of
adapters the labels of their hand-over (`hand_over`) go along, by which a rank knows its shares.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.step import Copies, JoinedRow, StepPlan
from cb_backend.contracts.token_rules import TokenRules


class WorkerRow(msgspec.Struct, frozen=True, array_like=True):
    """A `JoinedRow` with those of its rules alone that all ranks follow."""

    slot: int
    request_id: int
    token_ids: bytes  # int32
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    max_total_tokens: int
    prompt_logprobs: int | None
    adapter: int
    pooling: PoolingRules | None


class WorkerPlan(msgspec.Struct, frozen=True, array_like=True):
    """A `StepPlan`; arrays are the bytes of theirs, int32 but for `wants`."""

    step_id: int
    slots: bytes
    first: bytes
    num_tokens: bytes
    wants: bytes
    num_decode_rows: int
    joined: tuple[WorkerRow, ...]
    new_blocks: bytes
    copies_out: tuple[tuple[int, int], ...]
    copies_back: tuple[tuple[int, int], ...]
    num_drafts: int
    adapter_loads: tuple[tuple[int, bytes], ...]
    forgotten: tuple[bytes, ...]


class Received(NamedTuple):
    """A message of rank 0."""

    plan: StepPlan
    forgotten: tuple[bytes, ...]  # labels of adapters that this plan and those after it do not load


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkerPlan)


def encode_plan(
    plan: StepPlan, adapter_loads: tuple[tuple[int, bytes], ...] = (), forgotten: tuple[bytes, ...] = ()
) -> bytes:
    """For the ranks beside this one. adapter_loads: the plan's, with labels; forgotten: see `Received`."""
    return _encoder.encode(
        WorkerPlan(
            plan.step_id,
            plan.slots.tobytes(),
            plan.first.tobytes(),
            plan.num_tokens.tobytes(),
            plan.wants.tobytes(),
            plan.num_decode_rows,
            tuple(_worker_row(row) for row in plan.joined),
            plan.new_blocks.tobytes(),
            plan.copies.out,
            plan.copies.back,
            plan.num_drafts,
            adapter_loads,
            forgotten,
        )
    )


def decode_plan(message: bytes) -> Received:
    """The plan as rank 0 has it, but that rules tell nothing about sampling, and that labels stand for adapters' keys.
    Raises `msgspec.DecodeError`."""
    plan = _decoder.decode(message)
    decoded = StepPlan(
        step_id=plan.step_id,
        slots=_ints(plan.slots),
        first=_ints(plan.first),
        num_tokens=_ints(plan.num_tokens),
        wants=np.frombuffer(plan.wants, np.uint8),
        num_decode_rows=plan.num_decode_rows,
        joined=tuple(_joined_row(row) for row in plan.joined),
        new_blocks=_ints(plan.new_blocks).reshape(-1, 3).copy(),  # torch warns of arrays that it may not write to
        copies=Copies(plan.copies_out, plan.copies_back),
        num_drafts=plan.num_drafts,
        adapter_loads=plan.adapter_loads,
    )
    return Received(decoded, plan.forgotten)


def _worker_row(row: JoinedRow) -> WorkerRow:
    return WorkerRow(
        row.slot,
        row.request_id,
        row.token_ids.tobytes(),
        row.num_prompt_tokens,
        row.block_ids,
        row.max_total_tokens,
        row.params.prompt_logprobs,
        row.adapter,
        row.params.pooling,
    )


def _joined_row(row: WorkerRow) -> JoinedRow:
    return JoinedRow(
        slot=row.slot,
        request_id=row.request_id,
        token_ids=_ints(row.token_ids),
        num_prompt_tokens=row.num_prompt_tokens,
        block_ids=row.block_ids,
        params=TokenRules(prompt_logprobs=row.prompt_logprobs, pooling=row.pooling),
        stop_token_ids=(),
        max_total_tokens=row.max_total_tokens,
        adapter=row.adapter,
    )


def _ints(values: bytes) -> NDArray[np.int32]:
    return np.frombuffer(values, np.int32)
