"""What both model runners are made of: the model, its cache, who is in the batch, and what rows ask of their logits.

How a step is run is theirs; this module runs nothing.
"""

from __future__ import annotations

from cb_backend.engine.runner.input_batch import InputBatch
from cb_backend.engine.runner.logits_rules import LogitsRules
from cb_backend.engine.runner.logprobs import LogprobsOfStep
from cb_backend.engine.runner.token_masks import TokenMasks
from cb_backend.kv_cache.storage import KVCacheStorage
from cb_backend.kv_cache.swap import BlockSwapper
from cb_backend.layers.ops import Ops
from cb_backend.layers.rotary import RotaryTables
from cb_backend.models.decoder import DecoderForCausalLM


class RunnerBase:
    """The part of `outputs.ModelRunner` that does not depend on how steps are run."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        ops: Ops,
        rotary: RotaryTables,
        storage: KVCacheStorage,
        num_slots: int,
        max_model_len: int,
    ) -> None:
        """`storage` may be replaced later by a larger one of the same kind; `swapper` is set where blocks swap."""
        self.model = model
        self.ops = ops
        self.rotary = rotary
        self.storage = storage
        self.swapper: BlockSwapper | None = None
        self.device = storage.data.device
        self.batch = InputBatch(num_slots, max_model_len, storage.data.shape[-2])
        self.rules = LogitsRules(model.config.vocab_size, max_model_len, num_slots, self.device, ops)
        self.masks = TokenMasks(num_slots, self.device, ops)
        self.logprobs = LogprobsOfStep(self.device, ops)

    def prefix_cache_key(self, num_prompt_tokens: int) -> bytes:
        return self.rotary.cache_key(num_prompt_tokens)

    def close(self) -> None:
        """Give up the cache's memory; the runner cannot be used afterwards."""
        self.masks.close()
        self.storage.layers.clear()
        del self.storage.data
