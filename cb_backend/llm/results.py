"""What a caller gets back: whole answers, or what is new of one. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cb_backend.contracts.errors import CbError

# Of one token: token id -> {"logprob", "rank", "decoded_token"}; the token itself comes first, then the likeliest ones.
TokenFigures = dict[int, dict[str, Any]]


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt, or in `Chunk` what is new of it."""

    index: int  # of the prompt's `n` answers
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # those that count as output
    finish_reason: str | None = None  # "stop" | "length"; None: it has not ended, or its prompt has an `error`
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    cumulative_logprob: float | None = None  # None unless `logprobs` is asked for, as the next
    logprobs: list[TokenFigures] | None = None  # [num_tokens]


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt."""

    prompt: Any  # as it was given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # [n]
    prompt_logprobs: list[TokenFigures | None] | None = None  # [num_prompt_tokens], None for the first token
    error: CbError | None = None  # why the answers could not be finished; they hold what came before


@dataclass(slots=True)
class Chunk:
    """What is new of one answer. The first one of a prompt brings its `prompt_logprobs`, if they are asked for."""

    prompt_index: int  # which of the prompts
    output: CompletionOutput
    prompt_logprobs: list[TokenFigures | None] | None = None
