"""The runner of a rank that neither samples nor reads: the layers of its shard, and its part of logits, for rank 0."""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.contracts.step import StepPlan
from cb_backend.engine.runner.pooling import PoolingOfRank
from cb_backend.engine.runner.prompt_logprobs import AskingChunk, logits_of
from cb_backend.engine.runner.step_buffers import StepBuffers
from cb_backend.engine.runner.step_runner import StepRunner
from cb_backend.kv_cache.storage import KVCacheStorage
from cb_backend.layers.ops import Ops
from cb_backend.models.decoder import DecoderForCausalLM


class ShardRunner(StepRunner):
    """Calls what the group needs in the order in which a `SlotRunner` of the same plans does."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        ops: Ops,
        storage: KVCacheStorage,
        num_slots: int,
        max_model_len: int,
    ) -> None:
        super().__init__(model, ops, storage, num_slots, max_model_len)
        self.pooling = PoolingOfRank(model, num_slots, self.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Launch the step; its results are rank 0's."""
        if plan.joined:
            self.pooling.join(plan.joined)
        step = self._launch(plan)
        if plan.num_rows > plan.num_decode_rows:
            self.pooling.share_head(plan, step.hidden, step.buffers.shape.num_decode)

    def complete(self, plan: StepPlan) -> None:
        self.execute(plan)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _finish_step(self, buffers: StepBuffers, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden = self._last_states(buffers, hidden)
        return hidden, self.model.compute_logits(hidden) if self.model.spec.generates else None

    def _take_states(self, plan: StepPlan, chunks: list[AskingChunk], hidden: Tensor) -> None:
        for chunk in chunks:
            for _ in logits_of(chunk, hidden, self.model):
                pass  # rank 0 has them
