"""What passes between the scheduler and the model runner in one step. All of it is frozen: the receiver reads it.

A *row* is one request in one step. A *slot* is a request's fixed place in the device state for as long as it runs;
rows name slots. A step's plan carries only what changed (joins, new blocks) beside three arrays over the rows, so a
steady decode step costs the same host time whatever the batch size. What is made anew in every step is a `msgspec`
struct, made in a tenth of the time that a frozen dataclass takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.sampling_params import SamplingParams

NO_TOKEN = -1  # in sampled_token_ids: this row sampled nothing (a prefill chunk that is not the last)


@dataclass(frozen=True, slots=True)
class JoinedRow:
    """A request that takes a slot in this step, new or back from preemption. Filled by the scheduler."""

    slot: int
    request_id: int
    token_ids: NDArray[np.int32]  # [num_tokens] every token known: prompt, and output from before a preemption
    num_prompt_tokens: int
    block_ids: tuple[int, ...]  # the whole block table so far, cached prefix included
    params: SamplingParams
    stop_token_ids: tuple[int, ...]  # cannot be sampled while fewer than params.min_tokens tokens are out
    guide: object | None = None  # `engine.grammar.guide.Guide` of structured output: the request's own, only borrowed


NO_BLOCKS: NDArray[np.int32] = np.empty((0, 3), np.int32)
NO_BLOCKS.flags.writeable = False


class SchedulerOutput(msgspec.Struct, frozen=True):
    """The whole plan of one step. Row i runs tokens [computed[i], computed[i] + scheduled[i]) of its request.

    A row's input tokens are known to the runner: from `JoinedRow.token_ids`, or sampled by it in an earlier step.
    Decode rows (one token each, all sampling) come first, `num_decode_rows` of them.
    """

    step_id: int  # counts from 1 without gaps
    slots: NDArray[np.int32]  # [num_rows]
    num_computed_tokens: NDArray[np.int32]  # [num_rows] before this step
    num_scheduled_tokens: NDArray[np.int32]  # [num_rows], each >= 1
    is_sampling: NDArray[np.bool_]  # [num_rows] the row reaches its last known token, so it samples the next
    num_decode_rows: int
    joined: tuple[JoinedRow, ...] = ()
    # [n, 3] of (slot, index in its block table, block_id): blocks of slots that have joined before, one a slot.
    new_blocks: NDArray[np.int32] = NO_BLOCKS
    # (device block, host block) to copy before the step: first those that leave the device, then those that return.
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of sampled tokens: the model's own, before temperature, penalties and masks.

    Only of those that ask. `rows` says where each stands: a plan's row, later an entry of `EngineOutput`.
    """

    rows: NDArray[np.intp]  # [n] ascending
    sampled: NDArray[np.float32]  # [n] of the sampled token
    ranks: NDArray[np.int32]  # [n] of the sampled token: 1 + number of strictly likelier tokens
    top_ids: NDArray[np.int32]  # [n, k] likeliest first, ties by id; k is the most that any of the n asks for
    top_logprobs: NDArray[np.float32]  # [n, k]

    def moved(self, new_rows: NDArray[np.intp]) -> TokenLogprobs:
        """The same under other numbers: row i becomes new_rows[i]; -1 drops it."""
        rows = new_rows[self.rows]
        keep = rows >= 0
        return TokenLogprobs(
            rows[keep], self.sampled[keep], self.ranks[keep], self.top_ids[keep], self.top_logprobs[keep]
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of some tokens of a prompt, each given the tokens before it; the first has none."""

    first: int  # position of the first of the n tokens in the prompt, >= 1; a prompt computed anew begins at 1 again
    given: NDArray[np.float32]  # [n] of the prompt's token
    ranks: NDArray[np.int32]  # [n] of the prompt's token, as in `TokenLogprobs`
    top_ids: NDArray[np.int32]  # [n, k]
    top_logprobs: NDArray[np.float32]  # [n, k]


def rows_after(keep: NDArray[np.bool_], first: int = 0) -> NDArray[np.intp]:
    """New number of each row when only those of `keep` stay and the first of them becomes `first`; -1 = gone."""
    return np.where(keep, np.cumsum(keep) - 1 + first, -1)


class ModelRunnerOutput(msgspec.Struct, frozen=True):
    """What a step produced, in the plan's row order. Filled by the model runner."""

    step_id: int
    sampled_token_ids: NDArray[np.int32]  # [num_rows], NO_TOKEN where the row did not sample
    is_failed: NDArray[np.bool_]  # [num_rows] no token: numbers not finite, or its rules left none; its request ends
    logprobs: TokenLogprobs | None = None  # None: no row asks
    prompt_logprobs: dict[int, PromptLogprobs] = {}  # of the step's chunks, by row
    failures: dict[int, str] = {}  # row -> why it failed, where there is more to say than that


class PendingOutput(Protocol):
    """A step that has been launched; `result()` waits for it. Steps complete in the order of their launch."""

    def result(self) -> ModelRunnerOutput: ...


class ModelRunner(Protocol):
    """Executes plans. The real one, and the fakes of the tests, stand behind this.

    Plans must arrive in order. After `execute_model` the runner knows each sampled token without being told, so the
    next plan may be executed before the result of this one is read (run-ahead).
    """

    def execute_model(self, plan: SchedulerOutput) -> PendingOutput: ...

    def prefix_cache_key(self, num_prompt_tokens: int) -> bytes:
        """What cached keys and values depend on beside the tokens before them; b"" for nearly every model.

        Rotary embeddings of kind `dynamic` and `longrope` change with the prompt's length.
        """
        ...

    def close(self) -> None: ...


class EngineOutput(msgspec.Struct, frozen=True):
    """What one engine step tells the world: parallel arrays, one entry a token (or an end without a token)."""

    request_ids: NDArray[np.int64]  # [num_entries]
    token_ids: NDArray[np.int32]  # [num_entries], NO_TOKEN where a request ends without a new token
    finish_reasons: NDArray[np.uint8]  # [num_entries] FinishReason; 0 = goes on
    num_cached_tokens: dict[int, int] = {}  # request_id -> prompt tokens from the prefix cache
    logprobs: TokenLogprobs | None = None  # of the entries whose requests ask
    prompt_logprobs: dict[int, PromptLogprobs] = {}  # by request_id; it may have no entry
    failures: dict[int, str] = {}  # request_id -> why it ends with ERROR, for the client
