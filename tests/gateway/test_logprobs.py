"""Log-probabilities in OpenAI's two forms, out of the output `logprobs`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cb_backend.gateway.logprobs import chat_logprobs, completion_logprobs


def output(*tokens: list[tuple[str, float, int]]) -> str:
    """Of each token the chosen one and the likeliest: text, log-probability, rank. As the server writes it."""
    entries: list[dict[str, Any]] = [
        {
            str(number): {"logprob": value, "rank": rank, "decoded_token": text}
            for number, (text, value, rank) in enumerate(token)
        }
        for token in tokens
    ]
    return json.dumps(entries)


FIRST, SECOND, UNLIKELY = (" a", -0.5, 1), (" b", -1.0, 2), (" z", -7.0, 40)


@pytest.mark.parametrize(("number", "chosen", "expected"), [
    (0, FIRST, [" a"]), (1, FIRST, [" a"]), (2, FIRST, [" a", " b"]),
    (1, SECOND, [" a", " b"]),
    (0, UNLIKELY, [" z"]), (1, UNLIKELY, [" a", " z"]), (2, UNLIKELY, [" a", " b", " z"]),
])  # fmt: skip
def test_a_completion_shows_the_sampled_token_beside_the_likeliest(
    number: int, chosen: tuple[str, float, int], expected: list[str]
) -> None:
    """OpenAI: there may be up to `logprobs` + 1 of them."""
    others = [entry for entry in (FIRST, SECOND)[:number] if entry != chosen]
    shown = completion_logprobs(output([chosen, *others]), number, 3)
    assert shown is not None
    assert [list(top) for top in shown["top_logprobs"]] == [expected]
    assert shown["top_logprobs"][0][chosen[0]] == shown["token_logprobs"][0] == chosen[1]
    assert shown["text_offset"] == [3]


def test_of_tokens_with_one_text_the_sampled_one_and_then_the_likeliest_count() -> None:
    same, less = ("\ufffd", -0.25, 1), ("\ufffd", -2.0, 2)
    for chosen, others, expected in ((less, [same], -2.0), (same, [less], -0.25), (FIRST, [same, less], -0.25)):
        shown = completion_logprobs(output([chosen, *others]), 3, 0)
        assert shown is not None
        assert shown["top_logprobs"][0]["\ufffd"] == expected


def test_bytes_of_a_chats_tokens_are_right_or_left_out() -> None:
    """Clients join them: those of U+FFFD would be taken for the answer's own."""
    parts = [("\ufffd", -0.5, 1), (" \ufffd", -1.0, 2), ("größer", -1.5, 3)]
    shown = chat_logprobs(output(parts, parts[2:]), 3)
    assert shown is not None
    assert [entry["bytes"] for entry in shown["content"]] == [None, list("größer".encode())]
    assert [entry["token"] for entry in shown["content"]] == ["\ufffd", "größer"]
    assert [entry["bytes"] for entry in shown["content"][0]["top_logprobs"]] == [None, None, list("größer".encode())]
