"""What a client asks of one request: how its tokens are chosen, how many answers, when they stop, how they are shown.

Names and defaults are vLLM's, so that clients of `vllm_backend` keep working. Reading them from the wire is
`front_end.wire`'s work; what of them the engine obeys is a `token_rules.TokenRules` an answer.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.token_rules import (
    BOUNDS,
    MAX_BAD_WORDS,
    MAX_SEED,
    MAX_TOKENS,
    SamplingRules,
    TokenRules,
    check_count,
    check_int,
    check_lengths,
)

DEFAULT_MAX_TOKENS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_N = 64
MAX_BAD_WORD_BYTES = 256


class RequestParams(SamplingRules, frozen=True, kw_only=True, omit_defaults=True):
    """One request's parameters as the client gave them. Immutable."""

    n: int = 1  # answers to one prompt; each is an engine request of its own
    max_tokens: int | None = None  # most tokens to generate; None: 16, or with structured_output all that fit
    seed: int | None = None  # of the first answer, the next has the next; None: one is drawn
    stop: tuple[str, ...] = ()  # stop strings, matched on text by the front end
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True  # False: the text shows them as they are written
    spaces_between_special_tokens: bool = True  # False: no space between added tokens that follow each other
    truncate_prompt_tokens: int | None = None  # keep only so many tokens at the prompt's end; -1 = as many as fit
    bad_words: tuple[str, ...] = ()  # must not come out
    lora_name: str = ""  # of an adapter; empty: the model as it is

    @property
    def most_tokens(self) -> int:
        """`max_tokens`, or its default. A grammar says itself where its answer ends; half an object helps nobody."""
        if self.max_tokens is not None:
            return self.max_tokens
        return DEFAULT_MAX_TOKENS if self.structured_output is None else MAX_TOKENS

    def token_rules(self, bad_words_token_ids: tuple[tuple[int, ...], ...] = ()) -> list[TokenRules]:
        """What the engine obeys, an answer each. The first is what n = 1 would give; only it looks at the prompt.

        bad_words_token_ids: the token sequences of `bad_words`, which only a tokenizer can say.
        """
        shared: dict[str, Any] = {name: getattr(self, name) for name in SamplingRules.__struct_fields__}
        first = TokenRules(
            **shared,
            max_tokens=self.most_tokens,
            seed=secrets.randbits(64) if self.seed is None else self.seed,
            bad_words_token_ids=bad_words_token_ids,
        )
        others = (
            msgspec.structs.replace(first, seed=(first.seed + index) % (MAX_SEED + 1), prompt_logprobs=None)
            for index in range(1, self.n)
        )
        return [first, *others]

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` naming the first value that is out of range."""
        super().check(vocab_size)
        check_lengths(self.min_tokens, self.most_tokens)
        check_int("n", self.n, 1, MAX_N)
        if self.n > 1 and self.is_greedy:
            raise InvalidRequestError(
                f"n is {self.n}, but at temperature {self.temperature:g} all answers are the same; set n to 1 or raise"
                " the temperature"
            )
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, int(BOUNDS["max_tokens"][1]))
        self._check_stops()
        check_count("bad_words", self.bad_words, MAX_BAD_WORDS, "words")
        for word in self.bad_words:
            if not word.strip() or len(word.encode()) > MAX_BAD_WORD_BYTES:
                raise InvalidRequestError(f"each of bad_words must be a text of 1 to {MAX_BAD_WORD_BYTES} bytes")

    def _check_stops(self) -> None:
        check_count("stop", self.stop, MAX_STOP_STRINGS, "strings")
        for text in self.stop:
            if not text:
                raise InvalidRequestError("stop contains an empty string; remove it")
            if len(text.encode()) > MAX_STOP_STRING_BYTES:
                raise InvalidRequestError(
                    f"a stop string has {len(text.encode())} bytes; at most {MAX_STOP_STRING_BYTES} are allowed"
                )
