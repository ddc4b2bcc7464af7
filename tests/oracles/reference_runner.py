"""The reference model runner: one step at a time, every tensor built on the host, no state on the device, no graphs.

It says in the plainest way what a step means: the package's runner is compared with it. It runs on a CPU and on a GPU,
with either kernel backend.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.contracts.step import (
    NO_TOKEN,
    Attachment,
    Failure,
    JoinedRow,
    MaskSource,
    RowStatus,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Want,
)
from cb_backend.engine.runner.input_batch import InputBatch
from cb_backend.engine.runner.logits_rules import NO_TOKEN_LEFT, LogitsRules, status_with_rules
from cb_backend.engine.runner.logprobs import LogprobsOfStep
from cb_backend.engine.runner.pooling import PoolingOfStep
from cb_backend.engine.runner.prompt_logprobs import asking_chunks, launch_prompt_logprobs
from cb_backend.engine.runner.row_masks import RowMasks
from cb_backend.engine.runner.step_adapters import StepAdapters
from cb_backend.kernels.lora_plan import AdapterPlan
from cb_backend.kernels.row_sampling import ROW_PARAMETERS, RowSampling
from cb_backend.kv_cache.storage import KVCacheStorage
from cb_backend.kv_cache.swap import BlockSwapper
from cb_backend.layers.ops import Ops
from cb_backend.layers.step_metadata import StepMetadata
from cb_backend.models.decoder import DecoderForCausalLM


class CompletedStep:
    """A `Pending` whose result is there already."""

    def __init__(self, output: StepResult) -> None:
        self._output = output

    def result(self) -> StepResult:
        return self._output


class HostBatch(InputBatch):
    """The batch with what its rows sample by, on the host."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        super().__init__(num_slots, max_model_len, block_size)
        self.row_parameters = {name: np.zeros(num_slots, row.format) for name, row in ROW_PARAMETERS.items()}
        self.min_tokens = np.zeros(num_slots, np.int32)
        self.max_total_tokens = np.zeros(num_slots, np.int32)
        self.has_ended = np.zeros(num_slots, np.bool_)  # the last token is out
        self.stop_token_ids: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * num_slots

    def join(self, row: JoinedRow) -> None:
        super().join(row)
        for name, parameter in ROW_PARAMETERS.items():
            self.row_parameters[name][row.slot] = parameter.read(row.params)
        self.min_tokens[row.slot] = row.params.min_tokens
        self.max_total_tokens[row.slot] = row.max_total_tokens
        self.has_ended[row.slot] = False
        self.stop_token_ids[row.slot] = np.asarray(row.stop_token_ids, np.int64)

    def stop_ids_to_mask(self, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> list[tuple[int, NDArray]]:
        """(row, ids) of the rows that are still below their min_tokens. slots, positions: [num_sampling_rows]."""
        num_output_tokens = positions - self.num_prompt_tokens[slots]
        rows = np.flatnonzero(num_output_tokens < self.min_tokens[slots])
        return [(int(row), self.stop_token_ids[slots[row]]) for row in rows]

    def is_last(
        self, slots: NDArray[np.int32], positions: NDArray[np.int32], token_ids: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Whether these tokens, at these positions, are the last of their requests. Arrays [num_sampling_rows]."""
        num_output_tokens = positions + 1 - self.num_prompt_tokens[slots]
        is_stop = [token in self.stop_token_ids[slot] for slot, token in zip(slots, token_ids, strict=True)]
        is_stop &= num_output_tokens >= self.min_tokens[slots]
        return is_stop | (positions + 1 >= self.max_total_tokens[slots])


class ReferenceRunner:
    """Implements `step.Runner`. `execute` returns when the step is done."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        ops: Ops,
        storage: KVCacheStorage,
        num_slots: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.ops = ops
        self.storage = storage
        self.swapper: BlockSwapper | None = None
        self.adapters = None if model.adapters is None else StepAdapters(model.adapters, model.spec, ops)
        self.device = storage.data.device
        self.batch = HostBatch(num_slots, max_model_len, storage.layout.block_size)
        self.rules = LogitsRules(model.spec.vocab_size, num_slots, self.device, ops)
        self.masks = RowMasks(num_slots, self.device, ops)
        self.logprobs = LogprobsOfStep(self.device, ops)
        self.pooling = PoolingOfStep(model, num_slots, self.device)

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        return self.model.ropes.cache_key(num_prompt_tokens)

    def close(self) -> None:
        """There is nothing to give back."""

    @torch.inference_mode()
    def execute(self, plan: StepPlan, masks: MaskSource) -> CompletedStep:
        if self.swapper is not None:
            self.swapper.apply(plan)
        if self.adapters is not None:
            self.adapters.load(plan)
        self.batch.apply(plan)
        self.rules.join(plan.joined)
        self.masks.join(plan.joined)
        self.pooling.join(plan.joined)
        token_ids, metadata = self._prepare(plan)
        hidden = self.model(token_ids, metadata, self.storage.layers)  # [num_tokens, hidden_size]
        chunks = asking_chunks(plan, self.batch)
        attached: tuple[Attachment, ...] = ()
        if chunks:
            attached += launch_prompt_logprobs(chunks, hidden, self.model, self.ops, self.batch).result()
        sampled = np.full(plan.num_rows, NO_TOKEN, np.int32)
        status = np.zeros(plan.num_rows, np.uint8)
        if self.pooling.needs_all_states(plan):
            self.pooling.add(plan, hidden)
        ends = self._to_device(np.cumsum(plan.num_tokens) - 1)
        pooled = self.pooling.launch(plan, hidden[ends], plan.num_decode_rows)
        if pooled is not None:
            read, broken = pooled.result()
            attached += read
            status[broken] = RowStatus.NOT_FINITE
        rows = np.flatnonzero(plan.wants == Want.TOKENS)
        if len(rows):
            last_tokens = np.cumsum(plan.num_tokens)[rows] - 1
            last_hidden = hidden[self._to_device(last_tokens)]
            sampled[rows], status[rows], logprobs = self._sample(plan, rows, last_hidden, masks)
            sampled[status != RowStatus.OK] = NO_TOKEN
            ruled_out = np.flatnonzero(status == RowStatus.RULED_OUT)
            attached += (Failure(ruled_out, NO_TOKEN_LEFT),) if len(ruled_out) else ()
            attached += () if logprobs is None else (logprobs,)
        num_new = (sampled != NO_TOKEN).astype(np.uint8)
        return CompletedStep(StepResult(plan.step_id, sampled[:, None], num_new, status, attached))

    def _prepare(self, plan: StepPlan) -> tuple[Tensor, StepMetadata]:
        """The step's input tokens [num_tokens] and where everything is."""
        batch = self.batch
        counts = plan.num_tokens
        slots = np.repeat(plan.slots, counts)  # [num_tokens]
        starts = np.cumsum(counts) - counts  # [num_rows] index of each row's first token
        positions = np.arange(len(slots), dtype=np.int32) + np.repeat(plan.first - starts, counts)
        positions = positions.astype(np.int32)
        num_prompt_tokens = self._to_device(batch.num_prompt_tokens[slots])
        seq_lens = (plan.first + counts).astype(np.int32)
        decode, prefill = slice(0, plan.num_decode_rows), slice(plan.num_decode_rows, None)
        query_start_loc = np.concatenate(([0], np.cumsum(counts[prefill]))).astype(np.int32)
        metadata = StepMetadata(
            ropes=self.model.ropes.rows(self._to_device(positions), num_prompt_tokens),
            slot_mapping=(self._to_device(batch.slot_mapping(slots, positions)),),
            block_tables=(self._to_device(batch.block_tables),),
            num_decode_rows=plan.num_decode_rows,
            decode_slots=self._to_device(plan.slots[decode]),
            decode_seq_lens=self._to_device(seq_lens[decode]),
            prefill_slots=self._to_device(plan.slots[prefill]),
            prefill_query_start_loc=self._to_device(query_start_loc),
            prefill_seq_lens=self._to_device(seq_lens[prefill]),
            max_query_len=int(counts[prefill].max(initial=0)),
            adapters=self._plan_adapters(plan, query_start_loc),
        )
        return self._to_device(batch.token_ids[slots, positions]), metadata

    def _plan_adapters(self, plan: StepPlan, query_start_loc: NDArray[np.int32]) -> AdapterPlan | None:
        if self.adapters is None or not self.batch.has_adapters(plan.slots):
            return None
        slots, num_decode = self._to_device(plan.slots), plan.num_decode_rows
        of_slots = self._to_device(self.batch.adapters)
        return self.ops.plan_adapters(
            slots, num_decode, slots[num_decode:], self._to_device(query_start_loc), int(query_start_loc[-1]), of_slots,
            self.adapters.table.max_adapters,
        )  # fmt: skip

    def _sample(
        self, plan: StepPlan, rows: NDArray[np.intp], hidden: Tensor, masks: MaskSource
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], TokenLogprobs | None]:
        """Choose the next token of the given rows from their last hidden states [len(rows), hidden_size].

        Returns token ids, `RowStatus`, log-probabilities.
        """
        batch = self.batch
        slots = plan.slots[rows]
        positions = plan.first[rows] + plan.num_tokens[rows]  # of the token to be sampled
        logits = self.model.compute_logits(hidden)  # [len(rows), vocab_size]
        places = np.arange(len(rows))
        asking = self.logprobs.find(batch.num_logprobs[slots], rows, places)
        ruled = self.rules.find(slots, places, positions)
        scores = logits  # what is sampled from: `logits` stay as the model gave them
        stop_ids_to_mask = batch.stop_ids_to_mask(slots, positions)
        if ruled is not None or stop_ids_to_mask:
            scores = logits.to(torch.float32, copy=True)  # exact, so other rows sample what they would have
        masked = self.masks.find(slots, positions.tolist(), masks)
        if masked is not None:
            masked.mask_logits(scores)
        if ruled is not None:
            own_scores = scores[ruled.rows]
            self.rules.apply(ruled, own_scores)
            scores[ruled.rows] = own_scores
        for row, stop_ids in stop_ids_to_mask:
            scores[row, self._to_device(stop_ids)] = float("-inf")
        if masked is not None:
            masked.force_tokens(scores)
        token_ids, is_failed = self.ops.sample(
            scores,
            RowSampling(self._to_device(values[slots]) for values in batch.row_parameters.values()),
            self._to_device(positions.astype(np.int64)),
        )
        sampled = token_ids.cpu().numpy()
        batch.token_ids[slots, positions] = sampled
        has_ended = batch.has_ended[slots]
        batch.has_ended[slots] |= is_failed.cpu().numpy() | batch.is_last(slots, positions, sampled)
        if ruled is not None:
            self.rules.record(ruled, token_ids[ruled.rows])
        logprobs = None if asking is None else self.logprobs.launch(asking, logits, token_ids)
        status = torch.where(is_failed, RowStatus.NOT_FINITE, RowStatus.OK).to(torch.int32)
        if ruled is not None:
            was_failed = ~logits[ruled.rows].amax(dim=-1).isfinite()  # NaN where a row holds one
            own_status = torch.where(was_failed, RowStatus.NOT_FINITE, RowStatus.OK).to(torch.int32)
            status[ruled.rows] = status_with_rules(own_status, status[ruled.rows])
        told = np.where(has_ended, RowStatus.ENDED, status.cpu().numpy())
        return sampled, told, None if logprobs is None else logprobs.result()

    def _to_device(self, array: NDArray) -> Tensor:
        # A plan's arrays are frozen; torch wants to be able to write, so those are copied (they are small).
        array = np.require(array, requirements=["C", "W"])
        return torch.from_numpy(array).to(self.device)
