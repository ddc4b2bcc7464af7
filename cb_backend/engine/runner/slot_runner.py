"""The model runner: steps as `StepRunner` launches them, and their rows' tokens, sampled where the next step looks.

`execute` launches a step and returns at once; the next step may be launched before its result is read, because
the sampled tokens are already where the next step looks for them. What only some rows ask for (rules,
log-probabilities) is done for these rows after the step, from its logits.
On a CPU it is the same with the kernels' twins and without graphs: every step is done when it has been launched.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cb_backend.contracts.rest import Sleeper
from cb_backend.contracts.step import TOKENS_WANTED, MaskSource, NoMasks, StepPlan
from cb_backend.engine.runner.input_batch import is_sampled_apart
from cb_backend.engine.runner.logits_rules import LogitsRules, RuledRows, status_with_rules
from cb_backend.engine.runner.logprobs import LogprobsOfStep, PendingLogprobs
from cb_backend.engine.runner.pending_step import PendingStep
from cb_backend.engine.runner.pooling import PoolingOfStep
from cb_backend.engine.runner.prompt_logprobs import AskingChunk, PendingPromptLogprobs, launch_prompt_logprobs
from cb_backend.engine.runner.row_masks import MaskedRows, RowMasks
from cb_backend.engine.runner.step_buffers import StepBuffers
from cb_backend.engine.runner.step_runner import StepRunner
from cb_backend.kernels.row_sampling import RowSampling
from cb_backend.kv_cache.storage import KVCacheStorage
from cb_backend.layers.ops import Ops
from cb_backend.models.decoder import DecoderForCausalLM


class SlotRunner(StepRunner):
    """Implements `step.Runner` with run-ahead."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        ops: Ops,
        storage: KVCacheStorage,
        num_slots: int,
        max_model_len: int,
    ) -> None:
        super().__init__(model, ops, storage, num_slots, max_model_len)
        self.sleeper: Sleeper | None = None  # where the model may sleep
        self.weights_key = b""  # of weights that have taken the place of the configured ones
        self.rules = LogitsRules(model.spec.vocab_size, num_slots, self.device, ops)
        self.masks = RowMasks(num_slots, self.device, ops)
        self.logprobs = LogprobsOfStep(self.device, ops)
        self.pooling: PoolingOfStep = PoolingOfStep(model, num_slots, self.device)
        # Of the states in `hidden`, left here by graphs as these are.
        most_rows = len(self.hidden) if model.spec.generates else 0
        self.logits = torch.empty(most_rows, model.spec.vocab_size, dtype=model.dtype, device=self.device)
        self._is_asking = np.zeros(num_slots, np.bool_)  # slots whose rows ask for more than the step

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        return self.weights_key + self.model.ropes.cache_key(num_prompt_tokens)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, masks: MaskSource) -> PendingStep:
        if plan.joined:
            self.rules.join(plan.joined)
            self.masks.join(plan.joined)
            self.pooling.join(plan.joined)
            for row in plan.joined:
                self._is_asking[row.slot] = is_sampled_apart(row.params) or row.params.logprobs is not None
        step = self._launch(plan)
        buffers, num_decode = step.buffers, step.buffers.shape.num_decode
        pooled = None
        if plan.num_rows > plan.num_decode_rows:
            pooled = self.pooling.launch(plan, step.hidden, num_decode)
        logprobs = self._run_tail(plan, buffers, step.logits, masks)
        values, done = self.memory.fetch(plan.step_id, buffers.result)
        return PendingStep(plan, num_decode, values, done, logprobs, step.of_prompts, pooled)

    def complete(self, plan: StepPlan) -> None:
        self.execute(plan, NoMasks()).result()

    def _finish_step(self, buffers: StepBuffers, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """From hidden states to booked tokens. The logits are as the model gave them, but for stop ids before
        min_tokens."""
        hidden = self._last_states(buffers, hidden)
        if not self.model.spec.generates:
            return hidden, None
        num_rows = hidden.shape[0]
        logits = self.model.compute_logits(hidden, self.logits[:num_rows] if num_rows <= len(self.logits) else None)
        self._sample(buffers, logits)
        return hidden, logits

    def _take_states(self, plan: StepPlan, chunks: list[AskingChunk], hidden: Tensor) -> PendingPromptLogprobs | None:
        if self.pooling.needs_all_states(plan):
            self.pooling.add(plan, hidden)
        return launch_prompt_logprobs(chunks, hidden, self.model, self.ops, self.batch) if chunks else None

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

    def _sample(self, buffers: StepBuffers, logits: Tensor) -> None:
        """Choose the rows' tokens and book them. Changes stop ids in logits [num_rows, vocab_size]."""
        state, ops, slots, rows = self.state, self.ops, buffers.slots, buffers.rows
        ops.mask_stop_ids(logits, slots, rows.sample_positions, state.min_positions, state.stop_ids)
        token_ids, is_failed = ops.sample(logits, rows.sampling, rows.sample_positions)
        ops.commit_tokens(
            slots, token_ids, is_failed, rows.sample_positions, state.min_positions, state, buffers.result
        )
