"""The model runner of the GPU: state lives on the device, decode steps are graph replays, nothing waits.

`execute_model` launches a step and returns at once; the next step may be launched before its result is read, because
the sampled tokens are already where the next step looks for them. Steps with prompt tokens are launched kernel by
kernel. It runs on a CPU as well (eagerly), which is how its logic is tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.engine.decode_graphs import DecodeGraphs, StepBuffers, make_buffers
from cb_backend.engine.device_state import DeviceState, block_table_deltas, copy_to
from cb_backend.engine.input_batch import InputBatch
from cb_backend.kernels.step_state import empty_decode_inputs
from cb_backend.kv_cache.storage import KVCacheStorage
from cb_backend.layers.attention_metadata import AttentionMetadata
from cb_backend.layers.ops import Ops
from cb_backend.layers.rotary import RotaryTables
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.outputs import NO_TOKEN, ModelRunnerOutput, SchedulerOutput

RESULT_RING = 8  # more than the deepest run-ahead, so a host copy is never overwritten before it is read


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A `PendingOutput`: the step's sampled tokens are on their way to `host_result`."""

    step_id: int
    num_rows: int
    sampling_rows: NDArray[np.intp] | None  # which of the plan's rows sampled; None: all of them
    host_result: Tensor  # int32 [2, width], pinned; width >= number of sampling rows
    done: torch.cuda.Event | None

    def result(self) -> ModelRunnerOutput:
        if self.done is not None:
            self.done.synchronize()
        rows = self.sampling_rows
        count = self.num_rows if rows is None else len(rows)
        tokens, failed = self.host_result[:, :count].numpy().copy()
        if rows is None:
            return ModelRunnerOutput(self.step_id, tokens, failed.astype(np.bool_))
        sampled = np.full(self.num_rows, NO_TOKEN, np.int32)
        is_failed = np.zeros(self.num_rows, np.bool_)
        sampled[rows], is_failed[rows] = tokens, failed
        return ModelRunnerOutput(self.step_id, sampled, is_failed)


class SlotRunner:
    """Implements `outputs.ModelRunner` with run-ahead."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        ops: Ops,
        rotary: RotaryTables,
        storage: KVCacheStorage,
        num_slots: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.ops = ops
        self.rotary = rotary
        self.storage = storage
        self.block_size = storage.data.shape[-2]
        self.device = storage.data.device
        self.batch = InputBatch(num_slots, max_model_len, self.block_size)
        self.state = DeviceState(num_slots, self.batch.block_tables.shape[1], self.device)
        self.graphs = DecodeGraphs()
        is_cuda = self.device.type == "cuda"
        self._host_results = [
            torch.zeros(2 * num_slots, dtype=torch.int32, pin_memory=is_cuda) for _ in range(RESULT_RING)
        ]
        self._host_steps: dict[int, list[Tensor]] = {}  # bucket -> ring of pinned copies of StepBuffers.host
        self._last_graph_slots: tuple[int, NDArray[np.int32]] | None = None  # what the last replay's buffers hold

    def prefix_cache_key(self, num_prompt_tokens: int) -> bytes:
        return self.rotary.cache_key(num_prompt_tokens)

    def close(self) -> None:
        self.graphs.clear()
        self.storage.layers.clear()
        del self.storage.data

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> LaunchedStep:
        self.batch.apply(plan)
        self.state.join(plan.joined)
        deltas = block_table_deltas(plan)
        found = self.graphs.find(plan.num_rows) if plan.num_decode_rows == plan.num_rows else None
        if found is not None:
            graph, buffers = found
            self._fill(buffers, plan, deltas)
            graph.replay()
            return self._launched(plan, None, buffers.result)
        if len(deltas):
            self.ops.apply_deltas(self.state.block_tables, copy_to(torch.from_numpy(deltas), self.device))
        return self._run_eagerly(plan)

    # ---- a decode step -------------------------------------------------------------------------------------------

    def new_buffers(self, num_rows: int) -> StepBuffers:
        return make_buffers(num_rows, self.state.padding_slot, self.device)

    @torch.inference_mode()
    def decode_step(self, buffers: StepBuffers) -> None:
        """A whole step for rows that each have one token, reading and writing only device memory."""
        state, ops, inputs, slots = self.state, self.ops, buffers.inputs, buffers.slots
        ops.apply_deltas(state.block_tables, buffers.deltas)
        ops.prepare_decode(
            slots, state.last_token, state.num_tokens, state.block_tables, state.sampling, self.block_size, inputs
        )
        cos_sin, cos_sin_rows = self.rotary.rows(inputs.positions, self._num_prompt_tokens(slots))
        nothing = slots[:0]
        metadata = AttentionMetadata(
            cos_sin=cos_sin,
            cos_sin_rows=cos_sin_rows,
            slot_mapping=inputs.slot_mapping,
            block_tables=state.block_tables,
            num_decode_rows=slots.shape[0],
            decode_slots=slots,
            decode_seq_lens=inputs.seq_lens,
            prefill_slots=nothing,
            prefill_query_start_loc=nothing,
            prefill_seq_lens=nothing,
            max_query_len=0,
        )
        hidden = self.model(inputs.token_ids, metadata, self.storage.layers)
        self._sample(self.model.compute_logits(hidden), slots, inputs.sample_positions, buffers.result, inputs.sampling)

    def _num_prompt_tokens(self, slots: Tensor) -> Tensor:
        # Only angles that depend on the prompt's length look at it.
        if self.rotary.depends_on_prompt:
            return self.state.num_prompt_tokens[slots.long()]
        return slots

    def _sample(self, logits: Tensor, slots: Tensor, positions: Tensor, result: Tensor, sampling: tuple) -> None:
        state, ops = self.state, self.ops
        ops.mask_stop_ids(logits, slots, positions, state.min_positions, state.stop_ids)
        token_ids, is_failed = ops.sample(logits, *sampling, positions)
        ops.commit_tokens(slots, token_ids, positions, state.last_token, state.num_tokens)
        result[0].copy_(token_ids)
        result[1].copy_(is_failed)

    def _fill(self, buffers: StepBuffers, plan: SchedulerOutput, deltas: NDArray[np.int32]) -> None:
        """Bring a plan into a graph's buffers with one copy, or none when nothing changed since its last replay."""
        bucket, capacity = buffers.slots.shape[0], buffers.deltas.shape[0]
        if len(deltas) > capacity:
            self.ops.apply_deltas(self.state.block_tables, copy_to(torch.from_numpy(deltas), self.device))
            deltas = deltas[:0]
        last = self._last_graph_slots
        if not len(deltas) and last is not None and last[0] == bucket and np.array_equal(last[1], plan.slots):
            return
        ring = self._host_steps.get(bucket)
        if ring is None:
            shape = buffers.host.shape
            ring = [torch.empty(shape, dtype=torch.int32, pin_memory=True) for _ in range(RESULT_RING)]
            self._host_steps[bucket] = ring
        host = ring[plan.step_id % RESULT_RING]
        values = host.numpy()
        values[: plan.num_rows] = plan.slots
        values[plan.num_rows : bucket] = self.state.padding_slot
        values[bucket : bucket + 3 * len(deltas)] = deltas.reshape(-1)
        values[bucket + 3 * len(deltas) :] = -1
        buffers.host.copy_(host, non_blocking=True)
        # Deltas left in the buffers would be applied again by the next replay, to a slot that may have changed hands.
        self._last_graph_slots = (bucket, plan.slots) if not len(deltas) else None

    def _launched(self, plan: SchedulerOutput, rows: NDArray[np.intp] | None, result: Tensor) -> LaunchedStep:
        # One contiguous copy: a strided one would make torch wait for the device.
        host_result = self._host_results[plan.step_id % RESULT_RING][: result.numel()].view(result.shape)
        host_result.copy_(result, non_blocking=True)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return LaunchedStep(plan.step_id, plan.num_rows, rows, host_result, done)

    # ---- a step with prompt tokens -------------------------------------------------------------------------------

    def _run_eagerly(self, plan: SchedulerOutput) -> LaunchedStep:
        token_ids, metadata = self._prepare(plan)
        hidden = self.model(token_ids, metadata, self.storage.layers)  # [num_tokens, hidden_size]
        rows = np.flatnonzero(plan.is_sampling)
        result = torch.zeros(2, len(rows), dtype=torch.int32, device=self.device)
        if len(rows):
            last_tokens = np.cumsum(plan.num_scheduled_tokens)[rows] - 1
            slots = self._copy(plan.slots[rows])
            positions = self._copy((plan.num_computed_tokens + plan.num_scheduled_tokens)[rows].astype(np.int64))
            sampling = tuple(values[slots.long()] for values in self.state.sampling)
            logits = self.model.compute_logits(hidden[self._copy(last_tokens)])
            self._sample(logits, slots, positions, result, sampling)
        return self._launched(plan, rows, result)

    def _prepare(self, plan: SchedulerOutput) -> tuple[Tensor, AttentionMetadata]:
        """Input tokens [num_tokens] and metadata: decode rows from the device's state, prompt rows from the host's."""
        state, num_decode = self.state, plan.num_decode_rows
        counts = plan.num_scheduled_tokens[num_decode:]
        computed = plan.num_computed_tokens[num_decode:]
        slots = np.repeat(plan.slots[num_decode:], counts)  # [num_prefill_tokens]
        ends = np.cumsum(counts)
        positions = (np.arange(len(slots)) + np.repeat(computed - (ends - counts), counts)).astype(np.int32)
        decode_slots = self._copy(plan.slots[:num_decode])
        decode = empty_decode_inputs(num_decode, self.device)
        if num_decode:
            self.ops.prepare_decode(
                decode_slots,
                state.last_token,
                state.num_tokens,
                state.block_tables,
                state.sampling,
                self.block_size,
                decode,
            )
        all_positions = torch.cat((decode.positions, self._copy(positions)))
        num_prompt_tokens = self._copy(self.batch.num_prompt_tokens[np.concatenate((plan.slots[:num_decode], slots))])
        cos_sin, cos_sin_rows = self.rotary.rows(all_positions, num_prompt_tokens)
        slot_mapping = self._copy(self.batch.slot_mapping(slots, positions))
        metadata = AttentionMetadata(
            cos_sin=cos_sin,
            cos_sin_rows=cos_sin_rows,
            slot_mapping=torch.cat((decode.slot_mapping, slot_mapping)),
            block_tables=state.block_tables,
            num_decode_rows=num_decode,
            decode_slots=decode_slots,
            decode_seq_lens=decode.seq_lens,
            prefill_slots=self._copy(plan.slots[num_decode:]),
            prefill_query_start_loc=self._copy(np.concatenate(([0], ends)).astype(np.int32)),
            prefill_seq_lens=self._copy((computed + counts).astype(np.int32)),
            max_query_len=int(counts.max(initial=0)),
        )
        token_ids = self._copy(self.batch.token_ids[slots, positions])
        return torch.cat((decode.token_ids, token_ids)), metadata

    def _copy(self, array: NDArray) -> Tensor:
        return copy_to(torch.from_numpy(np.require(array, requirements=["C", "W"])), self.device)
