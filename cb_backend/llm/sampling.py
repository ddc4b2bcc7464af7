"""What a caller asks of the answers to a prompt: the served request's parameters, by the same names.

Nothing is checked or defaulted here: what is set goes through the reader of served requests, so that a value means, and
is refused as, what it would be there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from cb_backend.contracts.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one prompt, with vLLM's names. None: left out, so the default counts."""

    n: int | None = None  # answers to the prompt; 1
    max_tokens: int | None = None  # most tokens of an answer; 16, with structured output as many as fit
    min_tokens: int | None = None
    temperature: float | None = None  # 1.0; 0 is greedy
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None  # None: drawn anew for each prompt
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprobs: int | None = None  # likely tokens beside each chosen one; 0: the chosen one's figures only
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None  # {"json": schema}, {"regex": ...}, {"choice": [...]}, ...
    priority: int | None = None  # less is more urgent
    timeout_ms: int | None = None
    queue_timeout_ms: int | None = None
    cache_salt: str | None = None
    tenant: str | None = None

    def to_json(self) -> str:
        """The parameters that are set, as the JSON text of a served request's.

        Raises `InvalidRequestError` for a value that JSON cannot hold.
        """
        given = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None:
                given[name] = list(value) if isinstance(value, (tuple, set, frozenset)) else value
        for name, value in given.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidRequestError(
                    f"{name} is {value!r:.80}, which cannot be written as JSON: {error}"
                ) from None
        return json.dumps(given)
