"""Whether a request's own rules leave it any token to sample, which only they together can say."""

from __future__ import annotations

from collections.abc import Sequence

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.token_rules import TokenRules


def check_token_choice(rules: TokenRules, eos_token_ids: Sequence[int]) -> None:
    """Raises `InvalidRequestError` where nothing of `allowed_token_ids` can be sampled at the first token.

    `eos_token_ids` are the model's. Without `allowed_token_ids` there are more
    tokens than the other rules can forbid.
    """
    if not rules.allowed_token_ids:
        return
    bad_words = {sequence[0] for sequence in rules.bad_words_token_ids if len(sequence) == 1}
    left = set(rules.allowed_token_ids) - bad_words
    if not left:
        raise InvalidRequestError("bad_words forbids every token of allowed_token_ids; allow others")
    stops = {*rules.stop_token_ids, *(() if rules.ignore_eos else eos_token_ids)}
    if rules.min_tokens and left <= stops:
        raise InvalidRequestError(
            f"allowed_token_ids leaves only tokens that end the answer, which min_tokens ({rules.min_tokens}) forbids"
            " at first; set min_tokens to 0 or allow others"
        )
