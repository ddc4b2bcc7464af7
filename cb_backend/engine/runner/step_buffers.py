"""The fixed device memory of one shape of step, and how the host fills it: one array, one copy.

A step has `num_decode` rows of one token each, then `num_prefill` prompt tokens of up to `num_prompts` requests. A
plan that is smaller than the shape is filled up with padding: rows name the padding slot, tokens point at the null
block. This module does not know models or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.contracts.step import TOKENS_WANTED, StepPlan
from cb_backend.engine.runner.device_state import copy_to
from cb_backend.engine.runner.input_batch import InputBatch
from cb_backend.engine.step_shapes import StepShape
from cb_backend.kernels.row_sampling import neutral_rows
from cb_backend.kernels.step_rows import StepRows


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Device tensors of one shape; all but `rows` and `result` are views of `host_copy`."""

    shape: StepShape
    host_copy: Tensor  # int32, everything that the host brings
    segments: dict[str, Tensor]  # by name, see StepShape.sizes
    rows: StepRows
    result: Tensor  # int32 [2, num_rows]: sampled token ids, is_failed

    @property
    def slots(self) -> Tensor:
        return self.segments["slots"]  # [num_rows] decode rows, then the prompts that sample

    @property
    def deltas(self) -> Tensor:
        return self.segments["deltas"].view(-1, 3)  # of (slot, index, block_id), slot -1 = none


def make_buffers(shape: StepShape, host: NDArray[np.int32], device: torch.device) -> StepBuffers:
    """Buffers that hold what the host array does. Does not wait for the device: steps before it may still run there."""
    host_copy = copy_to(host, device)
    segments = {name: host_copy[where] for name, where in shape.layout()[0].items()}
    if "slot_mapping" in segments:
        segments["slot_mapping"] = segments["slot_mapping"].view(shape.mapping_shape)

    def ints(name: str) -> Tensor:
        found = segments.get(name)
        return torch.zeros(shape.num_decode, dtype=torch.int32, device=device) if found is None else found

    rows = StepRows(
        token_ids=ints("token_ids"),
        positions=ints("positions"),
        slot_mapping=segments.get("slot_mapping", torch.zeros(shape.mapping_shape, dtype=torch.int32, device=device)),
        num_prompt_tokens=ints("num_prompt_tokens"),
        seq_lens=torch.zeros(shape.num_decode, dtype=torch.int32, device=device),
        sampling=neutral_rows(shape.num_rows, device),
        sample_positions=torch.zeros(shape.num_rows, dtype=torch.int64, device=device),
    )
    return StepBuffers(
        shape, host_copy, segments, rows, torch.zeros(2, shape.num_rows, dtype=torch.int32, device=device)
    )


def padding(shape: StepShape, padding_slot: int) -> NDArray[np.int32]:
    """The host array of a step without a single request."""
    host = np.zeros(shape.layout()[1], np.int32)
    views = split(host, shape)
    views["slots"][:] = padding_slot
    views["deltas"][:] = -1
    if shape.num_prefill:
        views["prompt_slots"][:] = padding_slot
        views["sample_index"][: shape.num_decode] = np.arange(shape.num_decode)
    return host


def split(host: NDArray[np.int32], shape: StepShape) -> dict[str, NDArray[np.int32]]:
    """Views of a host array by segment."""
    views = {name: host[where] for name, where in shape.layout()[0].items()}
    if "slot_mapping" in views:
        views["slot_mapping"] = views["slot_mapping"].reshape(shape.mapping_shape)
    return views


def fill(
    views: dict[str, NDArray[np.int32]],
    shape: StepShape,
    plan: StepPlan,
    deltas: NDArray[np.int32],
    batch: InputBatch,
    padding_slot: int,
) -> None:
    """Write a plan, and padding around it, into a host array. The plan must fit the shape."""
    num_decode, bucket = plan.num_decode_rows, shape.num_decode
    slots = views["slots"]
    slots[:num_decode] = plan.slots[:num_decode]
    slots[num_decode:] = padding_slot
    views["deltas"][: 3 * len(deltas)] = deltas.reshape(-1)
    views["deltas"][3 * len(deltas) :] = -1
    if shape.num_prefill:
        _fill_prompts(views, bucket, plan, batch, padding_slot)


def _fill_prompts(
    views: dict[str, NDArray[np.int32]], bucket: int, plan: StepPlan, batch: InputBatch, padding_slot: int
) -> None:
    prompts = slice(plan.num_decode_rows, None)
    slots, counts, computed = plan.slots[prompts], plan.num_tokens[prompts], plan.first[prompts]
    num_prompts, ends = len(slots), np.cumsum(counts)
    num_tokens = int(ends[-1])
    token_slots = np.repeat(slots, counts)  # [num_tokens]
    positions = (np.arange(num_tokens) + np.repeat(computed - (ends - counts), counts)).astype(np.int32)
    tokens = slice(bucket, bucket + num_tokens)
    for name, values in (
        ("token_ids", batch.token_ids[token_slots, positions]),
        ("positions", positions),
        ("slot_mapping", batch.slot_mapping(token_slots, positions)),
        ("num_prompt_tokens", batch.num_prompt_tokens[token_slots]),
    ):
        views[name][..., tokens] = values
        views[name][..., bucket + num_tokens :] = 0
    views["prompt_slots"][:num_prompts] = slots
    views["prompt_slots"][num_prompts:] = padding_slot
    views["query_start_loc"][0] = 0
    views["query_start_loc"][1 : num_prompts + 1] = ends
    views["query_start_loc"][num_prompts + 1 :] = num_tokens
    views["prompt_seq_lens"][:num_prompts] = computed + counts
    views["prompt_seq_lens"][num_prompts:] = 0
    samplers = slice(bucket, bucket + num_prompts)
    views["slots"][samplers] = np.where(plan.wants[prompts] == TOKENS_WANTED, slots, padding_slot)
    views["sample_index"][:bucket] = np.arange(bucket)
    views["sample_index"][samplers] = bucket + ends - 1
    views["sample_index"][bucket + num_prompts :] = 0
