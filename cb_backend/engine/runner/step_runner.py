"""One rank's part of a step: state lives on the device by slot, on a GPU most steps are graph replays, nothing waits.

What all devices of a group do alike, whether one or several hold the model: take over a plan, run the layers, compute
logits. What is done with the logits is for whoever builds on it. A step too large for a graph is launched kernel by
kernel, and so is one with a prompt of which more than its last token's state is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.contracts.step import StepPlan
from cb_backend.engine.runner.device_state import (
    block_table_deltas,
    copy_to,
    deltas_of_groups,
    joined_slots,
    new_slot_state,
)
from cb_backend.engine.runner.host_memory import HostMemory
from cb_backend.engine.runner.input_batch import InputBatch
from cb_backend.engine.runner.pooling import PoolingOfRank
from cb_backend.engine.runner.prompt_logprobs import AskingChunk, PendingPromptLogprobs, asking_chunks
from cb_backend.engine.runner.step_adapters import StepAdapters
from cb_backend.engine.runner.step_buffers import StepBuffers, fill, make_buffers, padding, split
from cb_backend.engine.runner.step_graphs import StepGraphs
from cb_backend.engine.step_shapes import MAX_GRAPH_PROMPTS, StepShape
from cb_backend.kernels.step_rows import SlotState, StepRows
from cb_backend.kv_cache.storage import KVCacheStorage
from cb_backend.kv_cache.swap import BlockSwapper
from cb_backend.layers.ops import Ops
from cb_backend.layers.step_metadata import StepMetadata
from cb_backend.models.decoder import DecoderForCausalLM


class Launched(msgspec.Struct, frozen=True, eq=False):
    """A step on its way."""

    buffers: StepBuffers
    hidden: Tensor  # [num_rows, hidden_size]: of the rows' last tokens
    logits: Tensor | None  # [num_rows, vocab_size]; None: the model has no head, or a graph leaves them with its runner
    of_prompts: PendingPromptLogprobs | None


AnyRunner = TypeVar("AnyRunner", bound="StepRunner")


class StepRunner(ABC):
    """Takes plans in order and launches their steps."""

    pooling: PoolingOfRank

    def __init__(
        self,
        model: DecoderForCausalLM,
        ops: Ops,
        storage: KVCacheStorage,
        num_slots: int,
        max_model_len: int,
    ) -> None:
        """`storage` may be replaced later by a larger one of the same kind; `swapper` is set where blocks swap."""
        self.model = model
        self.ops = ops
        self.storage = storage
        self.swapper: BlockSwapper | None = None
        self.adapters = None if model.adapters is None else StepAdapters(model.adapters, model.spec, ops)
        self.device = storage.data.device
        self.block_size = storage.layout.block_size
        self.padding_slot = num_slots
        self.num_groups = len(storage.layout.groups)
        self.batch = InputBatch(num_slots, max_model_len, self.block_size, self.num_groups)
        self.state = new_slot_state(num_slots, self.batch.max_rows, self.device, self.num_groups)
        self.graphs = StepGraphs()
        self.memory = HostMemory(num_slots, self.device)
        # One for all graphs, which leave here the rows' last states; rows may need them again.
        most_rows = num_slots + MAX_GRAPH_PROMPTS
        self.hidden = torch.empty(most_rows, model.spec.hidden_size, dtype=model.dtype, device=self.device)
        self._last_replay: tuple[StepShape, NDArray[np.int32]] | None = None  # what a decode graph's buffers hold
        # Settled here, so that one device alone pays nothing for what others would have to be told.
        self._prepare_rows = ops.prepare_rows if model.group.size == 1 else self._prepare_shared_rows

    def close(self) -> None:
        """Give up the cache's memory; the runner cannot be used afterwards."""
        self.graphs.clear()
        self.storage.layers.clear()
        del self.storage.data

    def capture(self, shapes: Sequence[StepShape], tell: Callable[[str], None]) -> None:
        """Record a graph of a whole step for each shape. Of a group all ranks do it together."""
        has_others = self.model.group.size > 1
        self.graphs.capture(
            shapes, self.new_buffers, self.run_step, self.rehearse_step, tell, beside_threads=has_others
        )
        self.memory.prepare(self.graphs.shapes)

    def new_buffers(self, shape: StepShape) -> StepBuffers:
        """Buffers that hold nothing but padding."""
        shape = shape._replace(num_groups=self.num_groups)
        return make_buffers(shape, padding(shape, self.padding_slot), self.device)

    def _launch(self, plan: StepPlan) -> Launched:
        """Take over a plan and launch its step."""
        if self.swapper is not None:
            self.swapper.apply(plan)
        if self.adapters is not None:
            self.adapters.load(plan)
        self.batch.apply(plan)
        if plan.joined:
            self.ops.join_slots(copy_to(joined_slots(plan.joined), self.device), self.state)
        deltas = block_table_deltas(plan)
        if self.num_groups > 1:
            deltas = deltas_of_groups(deltas, self.num_groups, self.padding_slot + 1)
        num_decode = plan.num_decode_rows
        num_prompts = plan.num_rows - num_decode
        num_prefill = plan.total_tokens - num_decode if num_prompts else 0
        chunks = asking_chunks(plan, self.batch) if num_prompts else []
        has_adapters = self.adapters is not None and self.batch.has_adapters(plan.slots)
        is_summed = num_prompts > 0 and self.pooling.needs_all_states(plan)
        found = None if chunks or is_summed else self.graphs.find(num_decode, num_prefill, num_prompts, has_adapters)
        if found is not None:
            graph, buffers = found
            self._fill(buffers, plan, deltas)
            graph.replay()
            return Launched(buffers, self.hidden, None, None)
        shape = StepShape(num_decode, num_prefill, num_prompts, 0, has_adapters, self.num_groups)
        buffers = self._eager_buffers(shape, plan, deltas)
        hidden = self._compute_hidden(buffers)
        of_prompts = self._take_states(plan, chunks, hidden) if chunks or is_summed else None
        return Launched(buffers, *self._finish_step(buffers, hidden), of_prompts)

    @torch.inference_mode()
    def run_step(self, buffers: StepBuffers) -> None:
        """A whole step, reading and writing only device memory. What a graph captures."""
        self._finish_step(buffers, self._compute_hidden(buffers))

    def rehearse_step(self, buffers: StepBuffers) -> None:
        """Launches every kernel that `run_step` launches, for a small part of its launches; all of them where others
        take part, to whom other layers may be of one kind."""
        with self.model.abridged() if self.model.group.size == 1 else nullcontext():
            self.run_step(buffers)

    @abstractmethod
    def complete(self, plan: StepPlan) -> None:
        """Launch the plan's step and return when it is done; nothing of it is wanted."""

    @abstractmethod
    def _finish_step(self, buffers: StepBuffers, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Goes on from the hidden states [num_tokens, hidden_size]. Returns the rows' last ones [num_rows, hidden_size]
        and their logits [num_rows, vocab_size]; None: the model has no head."""

    @abstractmethod
    def _take_states(self, plan: StepPlan, chunks: list[AskingChunk], hidden: Tensor) -> PendingPromptLogprobs | None:
        """What is wanted of the states of all tokens, hidden [num_tokens, hidden_size]: logits of the chunks' tokens,
        and on rank 0 the figures from them."""

    def _last_states(self, buffers: StepBuffers, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_rows, hidden_size]; of a step with prompts in `self.hidden`, if that has so
        many rows."""
        if not buffers.shape.num_prefill:
            return hidden
        index = buffers.segments["sample_index"]
        out = None if len(index) > len(self.hidden) else self.hidden[: len(index)]
        return torch.index_select(hidden, 0, index, out=out)

    def _compute_hidden(self, buffers: StepBuffers) -> Tensor:
        """The layers. [num_tokens, hidden_size]"""
        shape, rows, segments = buffers.shape, buffers.rows, buffers.segments
        state, ops, slots = self.state, self.ops, buffers.slots
        ops.apply_deltas(state.block_tables, buffers.deltas)
        adapters = None
        if shape.has_adapters and self.adapters is not None:
            adapters = self.adapters.plan_step(buffers, state.adapter)
        self._prepare_rows(slots, shape.num_decode, state, self.block_size, rows)
        nothing = slots[:0]
        step = StepMetadata(
            ropes=self.model.ropes.rows(rows.positions, rows.num_prompt_tokens),
            slot_mapping=rows.slot_mapping.view(self.num_groups, -1)[:, : shape.num_tokens].unbind(),
            block_tables=state.tables.unbind(),
            num_decode_rows=shape.num_decode,
            decode_slots=slots[: shape.num_decode],
            decode_seq_lens=rows.seq_lens,
            prefill_slots=segments.get("prompt_slots", nothing),
            prefill_query_start_loc=segments.get("query_start_loc", nothing),
            prefill_seq_lens=segments.get("prompt_seq_lens", nothing),
            max_query_len=shape.num_prefill,
            adapters=adapters,
        )
        return self.model(rows.token_ids, step, self.storage.layers)

    def _prepare_shared_rows(
        self, slots: Tensor, num_decode: int, state: SlotState, block_size: int, rows: StepRows
    ) -> None:
        """`ops.prepare_rows`, after rank 0's last tokens of the decode rows have become everybody's, and how many there
        are: none once a request has ended. Rank 0 has booked them after the step before, wherever its rules ran.
        """
        self.model.group.share_tokens(state.last_token, state.num_tokens, slots[:num_decode])
        self.ops.prepare_rows(slots, num_decode, state, block_size, rows)

    # ---- what a plan brings ----------------------------------------------------------------------------------------

    def _eager_buffers(self, shape: StepShape, plan: StepPlan, deltas: NDArray[np.int32]) -> StepBuffers:
        """Buffers of just the plan's size."""
        deltas = self._apply_overflow(shape, deltas)
        host = padding(shape, self.padding_slot)
        fill(split(host, shape), shape, plan, deltas, self.batch, self.padding_slot)
        return make_buffers(shape, host, self.device)

    def _fill(self, buffers: StepBuffers, plan: StepPlan, deltas: NDArray[np.int32]) -> None:
        """Bring a plan into a graph's buffers with one copy, or none when nothing changed since its last replay."""
        shape = buffers.shape
        deltas = self._apply_overflow(shape, deltas)
        is_plain = not len(deltas) and not shape.num_prefill
        last = self._last_replay
        if is_plain and last is not None and last[0] == shape and np.array_equal(last[1], plan.slots):
            return
        host, views = self.memory.step(shape, plan.step_id)
        fill(views, shape, plan, deltas, self.batch, self.padding_slot)
        buffers.host_copy.copy_(host, non_blocking=True)
        # Deltas left in the buffers would be applied again by the next replay, to a slot that may have changed hands.
        self._last_replay = (shape, plan.slots) if is_plain else None

    def _apply_overflow(self, shape: StepShape, deltas: NDArray[np.int32]) -> NDArray[np.int32]:
        """Apply deltas at once when there are more than the shape has room for; returns those still to be applied."""
        if len(deltas) <= shape.num_deltas:
            return deltas
        self.ops.apply_deltas(self.state.block_tables, copy_to(deltas, self.device))
        return deltas[:0]
