"""What the engine obeys for one answer: how its tokens are chosen, and when it ends.

`SamplingRules` is what a client's parameters (`request_params.RequestParams`) and the engine's rules say in the same
words: each field, its default and its bounds stand here once. Names and defaults are vLLM's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.structured_output import StructuredOutput

# Below this temperature the distribution is numerically a single point; vLLM draws the line at the same value.
GREEDY_TEMPERATURE = 1e-5
MAX_TOKENS = 2**31 - 1  # as max_tokens: as many as the model's length leaves
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 17  # figures of one prompt: tokens * (prompt_logprobs + 1); about 80 bytes each on the wire
MAX_LOGIT_BIASES = 300
MAX_LOGIT_BIAS = 100.0  # either sign
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 64
BAD_WORD_FORMS = 3  # token sequences that one word may have
MAX_SEED = 2**64 - 1

# Least and greatest value of each number, both allowed; None is never compared.
BOUNDS: dict[str, tuple[float, float]] = {
    "max_tokens": (1, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "seed": (0, MAX_SEED),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 100.0),
}


@dataclass(frozen=True, slots=True)
class PerRow:
    """Marks a field that the sampler reads for each row of a step; says what it is on the device.

    The slot state, the array by which requests join, the gather of a step's rows, their padding and the sampler's
    arguments follow from the marked fields and their order (`kernels.row_sampling`).
    """

    format: str  # NumPy's; 32 or 64 bits
    neutral: float  # changes nothing: for rows of padding, and for slots that nobody has had yet
    read: Callable[[Any], float] | None = None  # of the rules; None: the field as it is


def _device_temperature(rules: TokenRules) -> float:
    return 0.0 if rules.is_greedy else rules.temperature


def _device_seed(rules: TokenRules) -> int:
    """The unsigned seed as the signed number of the same bits."""
    return rules.seed - 2**64 if rules.seed >= 2**63 else rules.seed


class SamplingRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen, in the words of clients and engine alike."""

    min_tokens: int = 0  # stop ids cannot be sampled, stop strings do not count, before this many tokens
    # 0 (anything below GREEDY_TEMPERATURE) = greedy, ties to the lowest id
    temperature: Annotated[float, PerRow("<f4", 0.0, _device_temperature)] = 1.0
    # only the k most likely tokens; 0 or -1 = off; above the vocabulary = off
    top_k: Annotated[int, PerRow("<i4", 0, lambda rules: max(rules.top_k, 0))] = 0
    top_p: Annotated[float, PerRow("<f4", 1.0)] = 1.0  # smallest set of tokens whose probability reaches this; 1 = off
    min_p: Annotated[float, PerRow("<f4", 0.0)] = 0.0  # drop tokens below min_p * (highest probability); 0 = off
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end-of-sequence ids
    ignore_eos: bool = False  # the model's own end-of-sequence ids do not stop (stop_token_ids still do)
    repetition_penalty: float = 1.0  # tokens of prompt and output: logit / r where above 0, else logit * r; 1 = off
    presence_penalty: float = 0.0  # taken from the logit of every token that the output holds
    frequency_penalty: float = 0.0  # the same, times how often the output holds it
    logit_bias: dict[int, float] = {}  # token id -> added to its logit
    allowed_token_ids: tuple[int, ...] = ()  # only these can be sampled; empty = all
    structured_output: StructuredOutput | None = None  # what the output must look like
    logprobs: int | None = None  # so many likely tokens beside each chosen one; 0 = the chosen one only; None = off
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, from the second on

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` naming the first value that is out of range."""
        for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            value = getattr(self, name)
            # Defaults are within their bounds, and most requests keep most of them. `is`: True equals 1.0 too.
            if value is not default and value is not None and name in BOUNDS:
                _check_number(name, value, vocab_size)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0 and at most 1, got 0; for greedy use temperature=0")
        if self.repetition_penalty < 0.01:
            raise InvalidRequestError(
                f"repetition_penalty must be at least 0.01, got {self.repetition_penalty:g}; 1 turns it off"
            )
        if self.structured_output is not None:
            self.structured_output.check()
        check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, vocab_size)
        check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, vocab_size)
        check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIASES, "entries")
        for token_id, bias in self.logit_bias.items():
            check_int("a token id in logit_bias", token_id, 0, vocab_size - 1)
            check_float("a value in logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)

    def check_prompt(self, num_prompt_tokens: int) -> None:
        """Raise `InvalidRequestError` if so long a prompt has more figures than one answer may carry."""
        num_figures = 0 if self.prompt_logprobs is None else num_prompt_tokens * (self.prompt_logprobs + 1)
        if num_figures > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"prompt_logprobs={self.prompt_logprobs} of a prompt of {num_prompt_tokens} tokens are {num_figures}"
                f" figures; at most {MAX_PROMPT_LOGPROBS} are allowed, so lower it or shorten the prompt"
            )


class TokenRules(SamplingRules, frozen=True, kw_only=True, omit_defaults=True):
    """The rules of one answer, complete: what an engine request carries. Immutable; travels as it is."""

    max_tokens: int = 16  # most tokens to generate, >= 1
    seed: Annotated[int, PerRow("<i8", 0, _device_seed)] = 0
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not come out
    pooling: PoolingRules | None = None  # what is read off the prompt, instead of tokens

    @property
    def has_logits_rules(self) -> bool:
        """Whether the logits are changed before sampling, apart from min_tokens."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words_token_ids
        )

    def check(self, vocab_size: int) -> None:
        super().check(vocab_size)
        check_lengths(self.min_tokens, self.max_tokens)
        if self.pooling is not None:
            self.pooling.check(vocab_size)
        check_count("bad_words_token_ids", self.bad_words_token_ids, BAD_WORD_FORMS * MAX_BAD_WORDS, "sequences")
        for sequence in self.bad_words_token_ids:
            if not sequence:
                raise InvalidRequestError("each of bad_words_token_ids must have a token, got an empty sequence")
            check_ids("a word of bad_words", sequence, MAX_BAD_WORD_TOKENS, vocab_size)


def check_lengths(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens ({min_tokens}) is greater than max_tokens ({max_tokens}); lower min_tokens"
        )


def check_ids(name: str, token_ids: Sized, most: int, vocab_size: int) -> None:
    check_count(name, token_ids, most, "ids")
    for token_id in token_ids:  # type: ignore[attr-defined]
        check_int(name, token_id, 0, vocab_size - 1)


def check_count(name: str, values: Sized, most: int, what: str) -> None:
    if len(values) > most:
        raise InvalidRequestError(f"{name} has {len(values)} {what}; at most {most} are allowed")


def check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}")


def check_float(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low:g} and {high:g}, got {value}")


def _check_number(name: str, value: Any, vocab_size: int) -> None:
    low, high = BOUNDS[name]
    if isinstance(high, int):
        check_int(name, value, int(low), min(high, vocab_size) if name.endswith("logprobs") else high)
    else:
        check_float(name, value, low, high)
