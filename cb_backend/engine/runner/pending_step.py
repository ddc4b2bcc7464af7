"""A step of the slot runner that is on its way: where its results will be, and how to wait for them."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from cb_backend.engine.runner.logits_rules import NO_TOKEN_LEFT, RULED_OUT
from cb_backend.engine.runner.logprobs import PendingLogprobs
from cb_backend.engine.runner.prompt_logprobs import PendingPromptLogprobs
from cb_backend.engine.runner.token_masks import GuidedRows
from cb_backend.outputs import NO_TOKEN, ModelRunnerOutput, SchedulerOutput


class PendingStep(msgspec.Struct, frozen=True, eq=False):
    """A `PendingOutput`: the step's sampled tokens are on their way to `host_result`."""

    plan: SchedulerOutput
    first_prompt: int  # column of the first prompt row in the result; decode rows begin at 0
    host_result: NDArray[np.int32]  # [2, columns], pinned: token ids; 0 or why a row failed
    done: torch.cuda.Event | None
    logprobs: PendingLogprobs | None
    prompt_logprobs: PendingPromptLogprobs | None
    guided: GuidedRows | None

    def result(self) -> ModelRunnerOutput:
        tokens, codes = self._tokens_and_codes()
        is_failed = codes != 0
        logprobs = None if self.logprobs is None else self.logprobs.result()
        of_prompts = {} if self.prompt_logprobs is None else self.prompt_logprobs.result()
        failures = {}
        if np.count_nonzero(codes):
            failures = dict.fromkeys(np.flatnonzero(codes == RULED_OUT).tolist(), NO_TOKEN_LEFT)
        if self.guided is not None:
            failures |= self.guided.read_tokens()
        if failures:
            is_failed[list(failures)] = True
        return ModelRunnerOutput(self.plan.step_id, tokens, is_failed, logprobs, of_prompts, failures)

    def sampled(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Token ids and is_failed [num_rows], as soon as they are there."""
        tokens, codes = self._tokens_and_codes()
        return tokens, codes != 0

    def _tokens_and_codes(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Token ids, and 0 or why a row failed, [num_rows] each."""
        if self.done is not None:
            self.done.synchronize()
        plan, num_decode = self.plan, self.plan.num_decode_rows
        values = self.host_result
        if num_decode == plan.num_rows:
            tokens, codes = values[:, :num_decode].copy()
            return tokens, codes
        prompts = values[:, self.first_prompt : self.first_prompt + plan.num_rows - num_decode]
        tokens, codes = np.concatenate((values[:, :num_decode], prompts), axis=1)
        return np.where(plan.is_sampling, tokens, NO_TOKEN), np.where(plan.is_sampling, codes, 0)
