"""A step that is on its way: where its results will be, and how to wait for them."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from cb_backend.contracts.step import (
    NO_TOKEN,
    ROW_OK,
    TOKENS_WANTED,
    Attachment,
    Failure,
    RowStatus,
    StepPlan,
    StepResult,
)
from cb_backend.engine.runner.logits_rules import NO_TOKEN_LEFT
from cb_backend.engine.runner.logprobs import PendingLogprobs
from cb_backend.engine.runner.pooling import PendingPooled
from cb_backend.engine.runner.prompt_logprobs import PendingPromptLogprobs


class PendingStep(msgspec.Struct, frozen=True, eq=False):
    """A `Pending`: the step's sampled tokens are on their way to `host_result`."""

    plan: StepPlan
    first_prompt: int  # column of the first prompt row in the result; decode rows begin at 0
    host_result: NDArray[np.int32]  # [2, columns], pinned: token ids; `RowStatus`
    done: torch.cuda.Event | None
    logprobs: PendingLogprobs | None
    prompt_logprobs: PendingPromptLogprobs | None
    pooled: PendingPooled | None = None

    def result(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        plan = self.plan
        token_ids, status, num_new = self._rows()
        attached: tuple[Attachment, ...] = ()
        if self.pooled is not None:
            attached, broken = self.pooled.result()
            status[broken] = RowStatus.NOT_FINITE
        if np.count_nonzero(status):
            is_failed = status != ROW_OK
            token_ids[is_failed] = NO_TOKEN
            num_new = np.where(is_failed, np.uint8(0), num_new)
            (ruled_out,) = (status == RowStatus.RULED_OUT).nonzero()
            if len(ruled_out):
                attached += (Failure(ruled_out, NO_TOKEN_LEFT),)
        if self.logprobs is not None:
            attached += (self.logprobs.result(),)
        if self.prompt_logprobs is not None:
            attached += self.prompt_logprobs.result()
        return StepResult(plan.step_id, token_ids, num_new, status, attached)

    def _rows(self) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint8]]:
        """Token ids [num_rows, 1], status and the number of new tokens [num_rows], as if none had failed."""
        plan, values, num_decode = self.plan, self.host_result, self.plan.num_decode_rows
        if num_decode == plan.num_rows:
            # A decode row wants one token and gains it.
            return values[0, :num_decode, None].copy(), values[1, :num_decode].astype(np.uint8), plan.wants
        prompts = slice(self.first_prompt, self.first_prompt + plan.num_rows - num_decode)
        tokens, status = np.concatenate((values[:, :num_decode], values[:, prompts]), axis=1)
        is_sampled = plan.wants == TOKENS_WANTED
        token_ids = np.where(is_sampled, tokens, np.int32(NO_TOKEN))[:, None]
        return token_ids, np.where(is_sampled, status, ROW_OK).astype(np.uint8), is_sampled.view(np.uint8)
