"""Rules that leave no token are refused; all others pass."""

from __future__ import annotations

import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.front_end.wire.token_choice import check_token_choice

EOS = (0, 9)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"allowed_token_ids": (0,), "min_tokens": 1}, "leaves only tokens that end the answer"),
        ({"allowed_token_ids": (0, 9, 5), "min_tokens": 2, "stop_token_ids": (5,)}, "min_tokens (2) forbids"),
        ({"allowed_token_ids": (5,), "min_tokens": 1, "stop_token_ids": (5,), "ignore_eos": True}, "end the answer"),
        ({"allowed_token_ids": (0, 5), "min_tokens": 1, "bad_words_token_ids": ((5,),)}, "end the answer"),
        ({"allowed_token_ids": (5, 6), "bad_words_token_ids": ((5,), (6,))}, "bad_words forbids every token"),
    ],
)
def test_no_token_is_left(params: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_token_choice(TokenRules(**params), EOS)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 3, "bad_words_token_ids": ((5,),)},
        {"allowed_token_ids": (0,)},
        {"allowed_token_ids": (0,), "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": (0, 5), "min_tokens": 1},
        {"allowed_token_ids": (5,), "bad_words_token_ids": ((5, 5),)},
    ],
)
def test_a_token_is_left(params: dict[str, object]) -> None:
    check_token_choice(TokenRules(**params), EOS)
