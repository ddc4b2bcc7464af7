"""How one request wants its tokens chosen, and when to stop.

Names and defaults are vLLM's, so that clients of `vllm_backend` keep working. This module checks values; turning
the wire's JSON into a `SamplingParams` (coercion of strings, unknown names) is `front_end.wire.protocol`'s work.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any

import msgspec

from cb_backend.errors import InvalidRequestError
from cb_backend.structured_output import StructuredOutput

# Below this temperature the distribution is numerically a single point; vLLM draws the line at the same value.
GREEDY_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 100.0
MAX_TOKENS = 2**31 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 17  # figures of one prompt: tokens * (prompt_logprobs + 1); about 80 bytes each on the wire
MAX_N = 64
MAX_PENALTY = 2.0  # of presence and frequency, either sign
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIASES = 300
MAX_LOGIT_BIAS = 100.0  # either sign
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 256
MAX_BAD_WORD_TOKENS = 64
BAD_WORD_FORMS = 3  # token sequences that one word may have
MAX_SEED = 2**64 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping rules of one request. Immutable; travels to the engine as it is."""

    n: int = 1  # answers to one prompt; each is an engine request of its own, with n = 1 and seed + its index
    best_of: int | None = None  # answers that are made, of which the n with the highest cumulative logprob are given
    max_tokens: int = 16  # most tokens to generate, >= 1
    min_tokens: int = 0  # stop ids cannot be sampled, stop strings do not count, before this many tokens
    temperature: float = 1.0  # 0 (anything below GREEDY_TEMPERATURE) = greedy, ties to the lowest id
    top_p: float = 1.0  # smallest set of tokens whose probability reaches this; 1 = off
    top_k: int = 0  # only the k most likely tokens; 0 or -1 = off; above the vocabulary = off
    min_p: float = 0.0  # drop tokens below min_p * (highest probability); 0 = off
    seed: int | None = None  # None: the front end draws one, so that a request always carries its seed
    stop: tuple[str, ...] = ()  # stop strings, matched on text by the front end
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end-of-sequence ids
    ignore_eos: bool = False  # the model's own end-of-sequence ids do not stop (stop_token_ids still do)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True  # False: the text shows them as they are written
    spaces_between_special_tokens: bool = True  # False: no space between added tokens that follow each other
    truncate_prompt_tokens: int | None = None  # keep only so many tokens at the prompt's end; -1 = as many as fit
    repetition_penalty: float = 1.0  # tokens of prompt and output: logit / r where above 0, else logit * r; 1 = off
    presence_penalty: float = 0.0  # taken from the logit of every token that the output holds
    frequency_penalty: float = 0.0  # the same, times how often the output holds it
    logit_bias: dict[int, float] = {}  # token id -> added to its logit
    allowed_token_ids: tuple[int, ...] = ()  # only these can be sampled; empty = all
    bad_words: tuple[str, ...] = ()  # must not come out
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # their token sequences; filled in by the front end
    structured_output: StructuredOutput | None = None  # what the output must look like
    logprobs: int | None = None  # so many likely tokens beside each chosen one; 0 = the chosen one only; None = off
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, from the second on

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_answers(self) -> int:
        """Answers to make: best_of, or n."""
        return self.n if self.best_of is None else self.best_of

    def of_answer(self, index: int) -> SamplingParams:
        """The parameters of one answer. The first is what n = 1 would give; only it looks at the prompt."""
        if self.num_answers == 1:
            return self
        seed = None if self.seed is None else (self.seed + index) % (MAX_SEED + 1)
        prompt_logprobs = None if index else self.prompt_logprobs
        return msgspec.structs.replace(self, n=1, best_of=None, seed=seed, prompt_logprobs=prompt_logprobs)

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
        """Raise `InvalidRequestError` naming the first value that is out of range."""
        _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens}); lower min_tokens"
            )
        _check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        self._check_answers()
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0 and at most 1, got 0; for greedy use temperature=0")
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31 - 1)
        if self.structured_output is not None:
            self.structured_output.check()
        self._check_stops(vocab_size)
        self._check_logits_rules(vocab_size)

    def check_prompt(self, num_prompt_tokens: int) -> None:
        """Raise `InvalidRequestError` if so long a prompt has more figures than one answer may carry."""
        num_figures = 0 if self.prompt_logprobs is None else num_prompt_tokens * (self.prompt_logprobs + 1)
        if num_figures > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"prompt_logprobs={self.prompt_logprobs} of a prompt of {num_prompt_tokens} tokens are {num_figures}"
                f" figures; at most {MAX_PROMPT_LOGPROBS} are allowed, so lower it or shorten the prompt"
            )

    def _check_answers(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, 1, MAX_N)
            if self.best_of < self.n:
                raise InvalidRequestError(f"best_of ({self.best_of}) is less than n ({self.n}); raise it or lower n")
        if self.num_answers > 1 and self.is_greedy:
            name = "n" if self.best_of is None else "best_of"
            raise InvalidRequestError(
                f"{name} is {self.num_answers}, but at temperature {self.temperature:g} all answers are the same; set"
                f" {name} to 1 or raise the temperature"
            )

    def _check_logits_rules(self, vocab_size: int) -> None:
        _check_float("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_float("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY)
        if self.repetition_penalty < 0.01:
            raise InvalidRequestError(
                f"repetition_penalty must be at least 0.01, got {self.repetition_penalty:g}; 1 turns it off"
            )
        _check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIASES, "entries")
        for token_id, bias in self.logit_bias.items():
            _check_int("a token id in logit_bias", token_id, 0, vocab_size - 1)
            _check_float("a value in logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        _check_count("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, "ids")
        for token_id in self.allowed_token_ids:
            _check_int("allowed_token_ids", token_id, 0, vocab_size - 1)
        _check_count("bad_words", self.bad_words, MAX_BAD_WORDS, "words")
        for word in self.bad_words:
            if not word.strip() or len(word.encode()) > MAX_BAD_WORD_BYTES:
                raise InvalidRequestError(f"each of bad_words must be a text of 1 to {MAX_BAD_WORD_BYTES} bytes")
        _check_count("bad_words_token_ids", self.bad_words_token_ids, BAD_WORD_FORMS * MAX_BAD_WORDS, "sequences")
        for sequence in self.bad_words_token_ids:
            if not 1 <= len(sequence) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequestError(f"each of bad_words must be 1 to {MAX_BAD_WORD_TOKENS} tokens")
            for token_id in sequence:
                _check_int("a token id of bad_words", token_id, 0, vocab_size - 1)

    def _check_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not text:
                raise InvalidRequestError("stop contains an empty string; remove it")
            if len(text.encode()) > MAX_STOP_STRING_BYTES:
                raise InvalidRequestError(
                    f"a stop string has {len(text.encode())} bytes; at most {MAX_STOP_STRING_BYTES} are allowed"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
            )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, vocab_size - 1)


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}")


def _check_count(name: str, values: Sized, most: int, what: str) -> None:
    if len(values) > most:
        raise InvalidRequestError(f"{name} has {len(values)} {what}; at most {most} are allowed")


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low:g} and {high:g}, got {value}")
