"""A prompt's way to token ids: text, ids, truncation and lengths."""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.front_end.text.chat import Chat
from cb_backend.front_end.text.prompt import prompt_token_ids
from cb_backend.front_end.wire.protocol import parse_request
from tests.front_end.conftest import ByteLevelKit


def ids_of(kit: ByteLevelKit, prompt: str | list[int], parameters: str = "", max_model_len: int = 100) -> list[int]:
    if isinstance(prompt, str):
        inputs = {"text_input": np.array([prompt.encode()], dtype=np.object_)}
    else:
        inputs = {"input_ids": np.array(prompt, np.int32)}
    generate = parse_request(inputs, parameters, 1000)
    return prompt_token_ids(generate, kit.tokenizer, Chat(kit.tokenizer), max_model_len)


def test_text_and_ids(byte_level: ByteLevelKit) -> None:
    assert ids_of(byte_level, "xy") == [byte_level.id("<s>"), *byte_level.ids(b"x", b"y")]
    assert ids_of(byte_level, [5, 6, 7]) == [5, 6, 7]  # nothing is added to ids


def test_d1_a_prompt_must_leave_room_for_a_token(byte_level: ByteLevelKit) -> None:
    assert len(ids_of(byte_level, [5] * 99)) == 99
    for prompt in ([5] * 100, "y" * 99):
        with pytest.raises(InvalidRequestError, match="the prompt has 100 tokens; at most 99 fit"):
            ids_of(byte_level, prompt)


def test_truncation_keeps_the_end_and_the_bos(byte_level: ByteLevelKit) -> None:
    bos, y, z = byte_level.id("<s>"), *byte_level.ids(b"y", b"z")
    assert ids_of(byte_level, "y" * 20 + "z", '{"truncate_prompt_tokens": 3}') == [bos, y, z]
    assert ids_of(byte_level, "y" * 20 + "z", '{"truncate_prompt_tokens": 1}') == [z]
    assert ids_of(byte_level, "yz", '{"truncate_prompt_tokens": 3}') == [bos, y, z]
    assert ids_of(byte_level, [7, 8, 9], '{"truncate_prompt_tokens": 2}') == [8, 9]
    fitted = ids_of(byte_level, "y" * 500 + "z", '{"truncate_prompt_tokens": -1}')
    assert (len(fitted), fitted[0], fitted[-1]) == (99, bos, z)
    with pytest.raises(InvalidRequestError, match="the prompt has 150 tokens; at most 99 fit"):
        ids_of(byte_level, "y" * 500, '{"truncate_prompt_tokens": 150}')


def test_the_limit_for_truncation_is_told_as_it_is(byte_level: ByteLevelKit) -> None:
    """The model's length by its own name, and how much longer a text may be that will be cut."""
    longest = byte_level.tokenizer.max_token_bytes
    for parameters, times, what in (
        ("", 1, f"max_model_len=100 tokens (the longest token has {longest} bytes); shorten"),
        ('{"truncate_prompt_tokens": 9}', 16, "16 times max_model_len=100 tokens"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            ids_of(byte_level, "y" * 10**6, parameters)
        limit = int(str(caught.value).split("at most ")[1].split()[0])
        assert limit % (100 * longest * times) == 0
        assert what in str(caught.value)
        assert "1600" not in str(caught.value)
