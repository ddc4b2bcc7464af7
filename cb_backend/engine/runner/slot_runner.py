"""The model runner: state lives on the device by slot, on a GPU most steps are graph replays, nothing waits.

`execute` launches a step and returns at once; the next step may be launched before its result is read, because
the sampled tokens are already where the next step looks for them. A step too large for a graph is launched kernel by
kernel, and so is one with a prompt whose own log-probabilities are asked for. What else only some rows ask for (rules,
log-probabilities) is done for these rows after the step, from its logits.
On a CPU it is the same with the kernels' twins and without graphs: every step is done when it has been launched.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.contracts.step import TOKENS_WANTED, MaskSource, StepPlan
from cb_backend.engine.runner.device_state import (
    block_table_deltas,
    copy_to,
    deltas_of_groups,
    joined_slots,
    new_slot_state,
)
from cb_backend.engine.runner.host_memory import HostMemory
from cb_backend.engine.runner.input_batch import InputBatch, is_sampled_apart
from cb_backend.engine.runner.logits_rules import LogitsRules, RuledRows, status_with_rules
from cb_backend.engine.runner.logprobs import LogprobsOfStep, PendingLogprobs
from cb_backend.engine.runner.pending_step import PendingStep
from cb_backend.engine.runner.pooling import PoolingOfStep
from cb_backend.engine.runner.prompt_logprobs import asking_chunks, launch_prompt_logprobs
from cb_backend.engine.runner.row_masks import MaskedRows, RowMasks
from cb_backend.engine.runner.step_adapters import StepAdapters
from cb_backend.engine.runner.step_buffers import StepBuffers, fill, make_buffers, padding, split
from cb_backend.engine.runner.step_graphs import StepGraphs
from cb_backend.engine.step_shapes import MAX_GRAPH_PROMPTS, StepShape
from cb_backend.kernels.row_sampling import RowSampling
from cb_backend.kv_cache.storage import KVCacheStorage
from cb_backend.kv_cache.swap import BlockSwapper
from cb_backend.layers.ops import Ops
from cb_backend.layers.step_metadata import StepMetadata
from cb_backend.models.decoder import DecoderForCausalLM


class SlotRunner:
    """Implements `step.Runner` with run-ahead."""

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
        self.rules = LogitsRules(model.spec.vocab_size, num_slots, self.device, ops)
        self.masks = RowMasks(num_slots, self.device, ops)
        self.logprobs = LogprobsOfStep(self.device, ops)
        self.pooling = PoolingOfStep(model, num_slots, self.device)
        self.graphs = StepGraphs()
        self.memory = HostMemory(num_slots, self.device)
        # One for all graphs, which leave here what rows need again: logits, and the hidden states that they are of.
        most_rows, spec = num_slots + MAX_GRAPH_PROMPTS, model.spec
        self.logits = torch.empty(
            most_rows if spec.generates else 0, spec.vocab_size, dtype=model.dtype, device=self.device
        )
        self.hidden = torch.empty(most_rows, spec.hidden_size, dtype=model.dtype, device=self.device)
        self._is_asking = np.zeros(num_slots, np.bool_)  # slots whose rows ask for more than the step
        self._last_replay: tuple[StepShape, NDArray[np.int32]] | None = None  # what a decode graph's buffers hold

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        return self.model.ropes.cache_key(num_prompt_tokens)

    def close(self) -> None:
        """Give up the cache's memory; the runner cannot be used afterwards."""
        self.graphs.clear()
        self.storage.layers.clear()
        del self.storage.data

    def new_buffers(self, shape: StepShape) -> StepBuffers:
        """Buffers that hold nothing but padding."""
        shape = shape._replace(num_groups=self.num_groups)
        return make_buffers(shape, padding(shape, self.padding_slot), self.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, masks: MaskSource) -> PendingStep:
        if self.swapper is not None:
            self.swapper.apply(plan)
        if self.adapters is not None:
            self.adapters.load(plan)
        self.batch.apply(plan)
        if plan.joined:
            self.rules.join(plan.joined)
            self.masks.join(plan.joined)
            self.pooling.join(plan.joined)
            for row in plan.joined:
                self._is_asking[row.slot] = is_sampled_apart(row.params) or row.params.logprobs is not None
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
        of_prompts = logits = None
        if found is None:
            shape = StepShape(num_decode, num_prefill, num_prompts, 0, has_adapters, self.num_groups)
            buffers = self._eager_buffers(shape, plan, deltas)
            hidden = self._compute_hidden(buffers)
            if chunks:
                of_prompts = launch_prompt_logprobs(chunks, hidden, self.model, self.ops, self.batch)
            if is_summed:
                self.pooling.add(plan, hidden)
            hidden, logits = self._finish_step(buffers, hidden)
        else:
            graph, buffers = found
            self._fill(buffers, plan, deltas)
            graph.replay()
            hidden = self.hidden
        pooled = self.pooling.launch(plan, hidden, buffers.shape.num_decode) if num_prompts else None
        logprobs = self._run_tail(plan, buffers, logits, masks)
        values, done = self.memory.fetch(plan.step_id, buffers.result)
        return PendingStep(plan, buffers.shape.num_decode, values, done, logprobs, of_prompts, pooled)

    @torch.inference_mode()
    def run_step(self, buffers: StepBuffers) -> None:
        """A whole step, reading and writing only device memory. What a graph captures."""
        self._finish_step(buffers, self._compute_hidden(buffers))

    def rehearse_step(self, buffers: StepBuffers) -> None:
        """Launches every kernel that `run_step` launches, for a small part of its launches."""
        with self.model.abridged():
            self.run_step(buffers)

    def _finish_step(self, buffers: StepBuffers, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """From hidden states to booked tokens. Returns the rows' last hidden states [num_rows, hidden_size], and the
        logits [num_rows, vocab_size] as the model gave them, but for stop ids before min_tokens."""
        if buffers.shape.num_prefill:
            index = buffers.segments["sample_index"]
            out = self.hidden[: len(index)] if len(index) <= len(self.hidden) else None
            hidden = torch.index_select(hidden, 0, index, out=out)  # [num_rows, hidden_size]
        if not self.model.spec.generates:
            return hidden, None
        num_rows = hidden.shape[0]
        logits = self.model.compute_logits(hidden, self.logits[:num_rows] if num_rows <= len(self.logits) else None)
        self._sample(buffers, logits)
        return hidden, logits

    def _run_tail(
        self, plan: StepPlan, buffers: StepBuffers, logits: Tensor | None, masks: MaskSource
    ) -> PendingLogprobs | None:
        """What rows ask for beyond the step: rules, which have them sample again, and log-probabilities.

        `logits` [num_rows, vocab_size]; None: where a graph leaves them.
        """
        batch = self.batch
        is_asking = self._is_asking[plan.slots]
        if not np.count_nonzero(is_asking):
            return None
        rows = np.flatnonzero(is_asking & (plan.wants == TOKENS_WANTED))
        if not len(rows):
            return None
        if logits is None:
            logits = self.logits[: buffers.shape.num_rows]
        slots, num_decode = plan.slots[rows], plan.num_decode_rows
        # Prompts stand behind the bucket's decode rows.
        places = np.where(rows < num_decode, rows, rows - num_decode + buffers.shape.num_decode)
        ruled = self.rules.find(slots, places, plan.first[rows] + plan.num_tokens[rows])
        if ruled is not None:
            masked = self.masks.find(ruled.host_slots, ruled.num_tokens, masks)
            self._sample_apart(ruled, masked, buffers, logits)
        asking = self.logprobs.find(batch.num_logprobs[slots], rows, places)
        return None if asking is None else self.logprobs.launch(asking, logits, buffers.result[0])

    def _sample_apart(self, ruled: RuledRows, masked: MaskedRows | None, buffers: StepBuffers, logits: Tensor) -> None:
        """Choose again where rules change the logits: as float32, in which a small bias is not rounded away."""
        state, ops, rules, result = self.state, self.ops, self.rules, buffers.result
        positions = buffers.rows.sample_positions[ruled.rows]
        if ruled.sampling is None:
            ruled.sampling = RowSampling(values[ruled.slots] for values in state.sampling)
        own_logits = logits[ruled.rows].float()  # [num_ruled_rows, vocab_size] a copy
        if masked is not None:
            masked.mask_logits(own_logits)
        rules.apply(ruled, own_logits)
        if ruled.has_min_tokens:
            ops.mask_stop_ids(own_logits, ruled.slots, positions, rules.min_positions, state.stop_ids)
        if masked is not None:
            masked.force_tokens(own_logits)
        token_ids, is_failed = ops.sample(own_logits, ruled.sampling, positions)
        chosen = result.new_empty(2, len(token_ids))
        # Booked again, over what the step itself has booked: only now it is known whether the request has ended.
        ops.commit_tokens(ruled.slots, token_ids, is_failed, positions, rules.min_positions, state, chosen)
        chosen[1] = status_with_rules(result[1, ruled.rows], chosen[1])
        result[:, ruled.rows] = chosen
        rules.record(ruled, token_ids)

    def _compute_hidden(self, buffers: StepBuffers) -> Tensor:
        """The layers. [num_tokens, hidden_size]"""
        shape, rows, segments = buffers.shape, buffers.rows, buffers.segments
        state, ops, slots = self.state, self.ops, buffers.slots
        ops.apply_deltas(state.block_tables, buffers.deltas)
        adapters = None
        if shape.has_adapters and self.adapters is not None:
            adapters = self.adapters.plan_step(buffers, state.adapter)
        ops.prepare_rows(slots, shape.num_decode, state, self.block_size, rows)
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

    def _sample(self, buffers: StepBuffers, logits: Tensor) -> None:
        """Choose the rows' tokens and book them. Changes stop ids in logits [num_rows, vocab_size]."""
        state, ops, slots, rows = self.state, self.ops, buffers.slots, buffers.rows
        ops.mask_stop_ids(logits, slots, rows.sample_positions, state.min_positions, state.stop_ids)
        token_ids, is_failed = ops.sample(logits, rows.sampling, rows.sample_positions)
        ops.commit_tokens(
            slots, token_ids, is_failed, rows.sample_positions, state.min_positions, state, buffers.result
        )

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
