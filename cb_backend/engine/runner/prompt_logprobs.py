"""Log-probabilities of a prompt's own tokens, for the requests that ask.

A chunk of a prompt gives the figures of the tokens after each of its own: logits exist for one slice of the chunk at a
time, so that a long prompt costs no more memory than a short one. This module knows hidden states, slots and chunks; it
does not know requests, and nothing here waits for the device before `result`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cb_backend.contracts.step import PromptLogprobs, StepPlan
from cb_backend.engine.runner.device_state import copy_to
from cb_backend.engine.runner.input_batch import InputBatch
from cb_backend.engine.runner.logprobs import to_host
from cb_backend.layers.ops import Ops
from cb_backend.models.decoder import DecoderForCausalLM

TOKENS_AT_ONCE = 128  # logits of so many tokens exist at a time


@dataclass(frozen=True, slots=True)
class AskingChunk:
    """A row of a plan whose chunk has tokens to tell about."""

    row: int
    first_token: int  # of the chunk, among the step's tokens
    first: int  # position of the first token to tell about: the one after the chunk's first
    num_tokens: int  # >= 1
    slot: int
    num_top: int


def asking_chunks(plan: StepPlan, batch: InputBatch) -> list[AskingChunk]:
    """The chunks of a plan that ask. The last token of a prompt tells about the output, so it is not among them."""
    num_top = batch.num_prompt_logprobs[plan.slots]  # [num_rows]
    rows = plan.num_decode_rows + np.flatnonzero(num_top[plan.num_decode_rows :] >= 0)
    if not len(rows):
        return []
    starts = np.cumsum(plan.num_tokens) - plan.num_tokens
    chunks = []
    for row in rows.tolist():
        slot, computed = int(plan.slots[row]), int(plan.first[row])
        end = min(computed + int(plan.num_tokens[row]), int(batch.num_prompt_tokens[slot]) - 1)
        if end > computed:
            chunks.append(AskingChunk(row, int(starts[row]), computed + 1, end - computed, slot, int(num_top[row])))
    return chunks


class PendingPromptLogprobs:
    """Results on their way to the host; read them after the step's own result is there."""

    def __init__(self, parts: list[tuple[AskingChunk, Tensor, Tensor]]) -> None:
        self._parts = parts

    def result(self) -> tuple[PromptLogprobs, ...]:
        """One for each chunk; its owner is the row of the plan."""
        results = []
        for chunk, floats, ints in self._parts:
            f, i, owner = floats.numpy(), ints.numpy(), np.array([chunk.row])
            results.append(PromptLogprobs(owner, chunk.first, f[:, 0], {"rank": i[:, 0]}, i[:, 1:], f[:, 1:]))
        return tuple(results)


def launch_prompt_logprobs(
    chunks: list[AskingChunk], hidden: Tensor, model: DecoderForCausalLM, ops: Ops, batch: InputBatch
) -> PendingPromptLogprobs:
    """Start the computation. hidden [num_tokens, hidden_size]: of the step's tokens, in the plan's order."""
    return PendingPromptLogprobs([(chunk, *_figures(chunk, hidden, model, ops, batch)) for chunk in chunks])


def _figures(
    chunk: AskingChunk, hidden: Tensor, model: DecoderForCausalLM, ops: Ops, batch: InputBatch
) -> tuple[Tensor, Tensor]:
    """As `top_logprobs` gives them, [num_tokens, 1 + k], on their way to the host."""
    given = copy_to(batch.token_ids[chunk.slot, chunk.first : chunk.first + chunk.num_tokens].copy(), hidden.device)
    parts = []
    for start, logits in logits_of(chunk, hidden, model):
        rows = torch.arange(len(logits), device=hidden.device)
        parts.append(ops.top_logprobs(logits, rows, given[start : start + len(logits)], chunk.num_top))
    floats, ints = (torch.cat(column) for column in zip(*parts, strict=True))
    return to_host(floats), to_host(ints)


def logits_of(chunk: AskingChunk, hidden: Tensor, model: DecoderForCausalLM) -> Iterator[tuple[int, Tensor]]:
    """(place in the chunk, logits from there on), a slice at a time: the same slices on every rank."""
    for start in range(0, chunk.num_tokens, TOKENS_AT_ONCE):
        end = min(start + TOKENS_AT_ONCE, chunk.num_tokens)
        yield start, model.compute_logits(hidden[chunk.first_token + start : chunk.first_token + end])
