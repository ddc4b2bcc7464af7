"""What passes between the scheduler and the model runner in one step. All of it is frozen: the receiver reads it.

A *row* is one request in one step. A *slot* is a request's fixed place in the device state for as long as it runs;
rows name slots. A step's plan carries only what changed (joins, new blocks) beside arrays over the rows, so a steady
decode step costs the same host time whatever the batch size. Everything in it can be written to a wire. What is made
anew in every step is a `msgspec` struct, made in a tenth of the time that a frozen dataclass takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.adapters import NO_ADAPTER, AdapterKey
from cb_backend.contracts.token_rules import TokenRules

NO_TOKEN = -1  # in token_ids: this row has no new token (a prefill chunk that is not the last, a row that failed)

# ---- what a step is to do ----------------------------------------------------------------------------------------


class Want(IntEnum):
    """What is wanted of a row's last position."""

    NOTHING = 0  # a prefill chunk that is not the last
    TOKENS = 1  # the row reaches its last known token, so it samples the next
    HIDDEN = 2  # its hidden state: the row ends a pooling request


# NOTE: plain numbers for what happens in every step: looking a member up in its enum costs ten times as much.
NOTHING_WANTED, TOKENS_WANTED, HIDDEN_WANTED = int(Want.NOTHING), int(Want.TOKENS), int(Want.HIDDEN)


@dataclass(frozen=True, slots=True)
class JoinedRow:
    """A request that takes a slot in this step, new or back from preemption. Filled by the scheduler."""

    slot: int
    request_id: int
    token_ids: NDArray[np.int32]  # [num_tokens] every token known: prompt, and output from before a preemption
    num_prompt_tokens: int
    block_ids: tuple[int, ...]  # the whole block table so far, cached prefix included
    params: TokenRules
    stop_token_ids: tuple[int, ...]  # cannot be sampled while fewer than params.min_tokens tokens are out; then an end
    max_total_tokens: int  # prompt and output: the token that reaches it is the last
    adapter: int = NO_ADAPTER  # device slot of the adapter that the request's rows go through


class Copies(msgspec.Struct, frozen=True):
    """(device block, host block) to copy before a step: first those that leave the device, then those that return."""

    out: tuple[tuple[int, int], ...] = ()
    back: tuple[tuple[int, int], ...] = ()


NO_BLOCKS: NDArray[np.int32] = np.empty((0, 3), np.int32)
NO_BLOCKS.flags.writeable = False
NO_COPIES = Copies()


class StepPlan(msgspec.Struct, frozen=True):
    """The whole plan of one step. Row i runs tokens [first[i], first[i] + num_tokens[i]) of its request.

    A row's input tokens are known to the runner: from `JoinedRow.token_ids`, or sampled by it in an earlier step.
    Decode rows (all of them want tokens) come first, `num_decode_rows` of them; they have one token each, and
    `num_drafts` guesses of the tokens after it.

    NOTE: with guesses, `first` of a decode row is the most it can be: how many of the guesses of steps before were
    right is known to the runner alone, until their results are read.
    """

    step_id: int  # counts from 1 without gaps
    slots: NDArray[np.int32]  # [num_rows]
    first: NDArray[np.int32]  # [num_rows] tokens computed before this step
    num_tokens: NDArray[np.int32]  # [num_rows], each >= 1
    wants: NDArray[np.uint8]  # [num_rows] `Want`
    num_decode_rows: int
    joined: tuple[JoinedRow, ...] = ()
    # [n, 3] of (slot, index in its block table, block_id): blocks of slots that have joined before, one a slot.
    new_blocks: NDArray[np.int32] = NO_BLOCKS
    copies: Copies = NO_COPIES
    # (device slot, what it holds from this step on), to copy from host memory before anything of the step.
    adapter_loads: tuple[tuple[int, AdapterKey], ...] = ()
    num_drafts: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


# ---- what it gave ------------------------------------------------------------------------------------------------


class RowStatus(IntEnum):
    """What became of a row."""

    OK = 0
    NOT_FINITE = 1  # its own logits are not finite: no token
    RULED_OUT = 2  # its rules left no token
    ENDED = 3  # a step launched before gave its request's last token: nothing was computed


ROW_OK = int(RowStatus.OK)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of sampled tokens: the model's own, before temperature, penalties and masks.

    Only of those that ask.
    """

    owners: NDArray[np.int64]  # [n] whose: the plan's rows, later request ids
    sampled: NDArray[np.float32]  # [n] of the sampled token
    # Figures of the sampled token by name, [n] each, int32 or float32. They reach the client under their names;
    # "rank": 1 + number of strictly likelier tokens.
    figures: dict[str, NDArray[Any]]
    top_ids: NDArray[np.int32]  # [n, k] likeliest first, ties by id; k is the most that any of the n asks for
    top_logprobs: NDArray[np.float32]  # [n, k]

    def given_to(self, owners: NDArray[np.int64], keep: NDArray[np.bool_]) -> TokenLogprobs:
        """The figures kept, under other owners. Both [n]."""
        figures = {name: values[keep] for name, values in self.figures.items()}
        return TokenLogprobs(owners[keep], self.sampled[keep], figures, self.top_ids[keep], self.top_logprobs[keep])


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of some tokens of one prompt, each given the tokens before it; the first has none."""

    owners: NDArray[np.int64]  # [1] whose prompt, as in `TokenLogprobs`
    first: int  # position of the first of the n tokens in the prompt, >= 1; a prompt computed anew begins at 1 again
    given: NDArray[np.float32]  # [n] of the prompt's token
    figures: dict[str, NDArray[Any]]  # [n] each, of the prompt's token, as in `TokenLogprobs`
    top_ids: NDArray[np.int32]  # [n, k]
    top_logprobs: NDArray[np.float32]  # [n, k]

    def given_to(self, owners: NDArray[np.int64], keep: NDArray[np.bool_]) -> PromptLogprobs:
        """The same under another owner; nothing is left of it where it is not kept."""
        return PromptLogprobs(owners[keep], self.first, self.given, self.figures, self.top_ids, self.top_logprobs)


@dataclass(frozen=True, slots=True)
class Pooled:
    """What was read off prompts whose last token the step has computed: `pooling.PoolingRules` says what."""

    owners: NDArray[np.int64]  # [n] whose prompts, as in `TokenLogprobs`
    values: NDArray[np.float32]  # [n, size]

    def given_to(self, owners: NDArray[np.int64], keep: NDArray[np.bool_]) -> Pooled:
        return Pooled(owners[keep], self.values[keep])


@dataclass(frozen=True, slots=True)
class Failure:
    """Why rows failed, where there is more to say than their status does."""

    owners: NDArray[np.int64]  # [n], as in `TokenLogprobs`
    text: str  # for the client

    def given_to(self, owners: NDArray[np.int64], keep: NDArray[np.bool_]) -> Failure:
        return Failure(owners[keep], self.text)


# What a step gives some of its rows beside tokens. All kinds go one way: the runner names rows, the scheduler makes
# them request ids and drops what nobody waits for any more, a front end's sinks get what is theirs.
# NOTE: columns of many owners, and not one object a row: 256 rows with log-probabilities cost a few array calls.
Attachment = TokenLogprobs | PromptLogprobs | Pooled | Failure


class StepResult(msgspec.Struct, frozen=True):
    """What a step produced, in the plan's row order. Filled by the model runner."""

    step_id: int
    token_ids: NDArray[np.int32]  # [num_rows, 1 + num_drafts]; NO_TOKEN where the row has no new token
    num_new: NDArray[np.uint8]  # [num_rows] tokens that the row gained: 0 where it failed, or did not want any
    status: NDArray[np.uint8]  # [num_rows] `RowStatus`
    attached: tuple[Attachment, ...] = ()


class Pending(Protocol):
    """A step that has been launched; `result()` waits for it. Steps complete in the order of their launch."""

    def result(self) -> StepResult: ...


# ---- who does it -------------------------------------------------------------------------------------------------


class TokenMasks(msgspec.Struct, frozen=True):
    """Which tokens may come next in some rows. Plain arrays, which can be sent on."""

    rows: NDArray[np.intp]  # [n] indices among the rows that were asked about; the others may sample any token
    bits: NDArray[np.int32]  # [n, num_words] token i may come: bit i % 32 of word i // 32
    forced: NDArray[np.int32]  # [n] the token that must come, whatever other rules say; NO_TOKEN: none


class MaskSource(Protocol):
    """Knows the tokens that rows of structured output may sample next."""

    def masks(self, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> TokenMasks | None:
        """Of these slots' tokens at these positions, of the step that is being launched. None: they may be any.

        Waits for the steps before, not for this one: to be asked as late as possible, while the device computes.
        """
        ...


class NoMasks:
    """A `MaskSource` for steps without structured output."""

    def masks(self, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> TokenMasks | None:
        return None


class Runner(Protocol):
    """Executes plans. The real one, and the fakes of the tests, stand behind this.

    Plans must arrive in order. After `execute` the runner knows each sampled token without being told, so the next plan
    may be executed before the result of this one is read (run-ahead). It ends a row by itself at a stop id or at its
    last token: later plans, made before that was known, find nothing to compute in it.
    """

    def execute(self, plan: StepPlan, masks: MaskSource) -> Pending: ...

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        """What cached keys and values depend on beside the tokens before them; b"" for nearly every model.

        Rotary embeddings of kind `dynamic` and `longrope` change with the prompt's length.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class WatchedRunner(Runner, Protocol):
    """A runner that has parts in other processes, which may end."""

    def lost(self) -> str | None:
        """Why no step can run any more; None while all parts live."""
        ...


# ---- what it means for requests ----------------------------------------------------------------------------------


class EngineOutput(msgspec.Struct, frozen=True):
    """What one engine step tells the world: parallel arrays, one entry a token (or an end without a token)."""

    request_ids: NDArray[np.int64]  # [num_entries]
    token_ids: NDArray[np.int32]  # [num_entries], NO_TOKEN where a request ends without a new token
    finish_reasons: NDArray[np.uint8]  # [num_entries] FinishReason; 0 = goes on
    num_cached_tokens: dict[int, int] = {}  # request_id -> prompt tokens from the prefix cache
    attached: tuple[Attachment, ...] = ()  # its owners are request ids; they may have no entry
