"""The inputs of a request, right and wrong, and what becomes of them. Every failure is an `InvalidRequestError`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request_params import RequestParams
from cb_backend.front_end.wire.protocol import parse_request
from tests.front_end.parsing import VOCAB_SIZE, flag, parse, refusal, text_array


def test_defaults() -> None:
    request = parse()
    assert (request.text, request.is_stream, request.is_input_prepended) == ("hi", False, True)
    flags = (request.return_finish_reason, request.return_num_input_tokens, request.return_num_output_tokens)
    assert flags == (False, False, False)
    assert request.params == RequestParams()
    assert request.params.most_tokens == 16


@pytest.mark.parametrize(
    ("stream", "exclude", "is_prepended"),
    [(None, None, True), (False, None, True), (None, True, False), (None, False, True), (True, None, False),
     (True, True, False)],
)  # fmt: skip
def test_prompt_is_prepended_by_rule(stream: bool | None, exclude: bool | None, is_prepended: bool) -> None:
    given = {"stream": stream, "exclude_input_in_output": exclude}
    request = parse(**{name: flag(value) for name, value in given.items() if value is not None})
    assert (request.is_stream, request.is_input_prepended) == (bool(stream), is_prepended)


def test_streaming_with_the_prompt_is_refused_in_the_words_of_vllm_backend() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(stream=flag(True), exclude_input_in_output=flag(False))
    assert str(caught.value) == (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )


def test_return_flags() -> None:
    request = parse(return_finish_reason=flag(True), return_num_output_tokens=flag(True))
    assert request.return_finish_reason
    assert request.return_num_output_tokens
    assert not request.return_num_input_tokens


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_shapes_are_flattened(shape: tuple[int, ...]) -> None:
    inputs = {"text_input": text_array("é".encode(), shape=shape), "stream": np.array(True).reshape(shape)}
    request = parse_request(inputs, "", VOCAB_SIZE)
    assert (request.text, request.is_stream) == ("é", True)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": text_array()}, r"text_input.*exactly one element, got shape \[0\]"),
        ({"text_input": text_array(b"a", b"b")}, r"exactly one element, got shape \[2\]"),
        ({"text_input": np.array([1.0])}, "text_input.*BYTES, got an array of float64"),
        ({"text_input": np.array(["text"], dtype=np.object_)}, "must hold bytes, got str"),
        ({"text_input": text_array(b"ab\xff")}, "text_input.*not valid UTF-8.*byte 2"),
        ({"sampling_parameters": text_array(b"{\xff}")}, "sampling_parameters.*not valid UTF-8"),
        ({"sampling_parameters": text_array(b" ")}, "sampling_parameters.*empty"),
        ({"stream": np.array([1])}, "stream.*BOOL, got an array of int64"),
        ({"stream": np.array([True, False])}, "stream.*exactly one"),
        ({"return_finish_reason": np.array([b"true"], dtype=np.object_)}, "return_finish_reason.*BOOL"),
        ({"prompt": text_array(b"x")}, "unknown input 'prompt'"),
        ({"image": text_array(b"aGk=")}, "'image' is not supported yet"),
        ({"embedding_request": text_array(b'{"input": "x"}')}, "'embedding_request' is not supported yet"),
        ({"return_logprobs": np.array([1])}, "'return_logprobs' must be of type BOOL"),
    ],
)
def test_bad_inputs_are_named(inputs: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse(**inputs)


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="input 'text_input' is missing"):
        parse_request({}, "", VOCAB_SIZE)


def test_a_prompt_of_token_ids() -> None:
    ids = np.array([[3, 499, 0]], np.int32)
    request = parse_request({"input_ids": ids}, "", VOCAB_SIZE)
    assert (request.input_ids, request.text, request.is_input_prepended) == ([3, 499, 0], "", False)
    for array, message in [
        (np.array([500], np.int32), r"token id 500 in 'input_ids' is outside the vocabulary \(0 to 499\)"),
        (np.array([3, -1], np.int32), "token id -1 in 'input_ids' is outside"),
        (np.array([], np.int32), "'input_ids' is empty"),
        (np.array([3], np.int64), "'input_ids' must be of type INT32, got an array of int64"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            parse_request({"input_ids": array}, "", VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match="are both given; send one of them"):
        parse(input_ids=ids)
    with pytest.raises(InvalidRequestError, match="only a prompt in 'text_input' can be repeated"):
        parse_request({"input_ids": ids, "exclude_input_in_output": flag(False)}, "", VOCAB_SIZE)


@pytest.mark.parametrize("value", [0, -2, 1.5, "x", True])
def test_bad_truncation(value: Any) -> None:
    assert refusal({"truncate_prompt_tokens": value}).startswith("truncate_prompt_tokens must be")


def test_inputs_that_ask_for_nothing_pass() -> None:
    off = flag(False)
    request = parse(
        return_logprobs=off, return_cumulative_logprob=off, image=text_array(), embedding_request=text_array(b"")
    )
    assert request.text == "hi"
    assert request.params.logprobs is None


@pytest.mark.parametrize(
    ("value", "wants_list", "wants_sum", "computed"),
    [
        (None, False, False, None),
        (3, False, False, None),  # no output would show them: as in vllm_backend, not computed and no error
        (3, True, False, 3),
        (0, True, False, 0),
        (None, True, False, None),  # the output is "null"
        (None, False, True, 0),
        (3, False, True, 0),
        (3, True, True, 3),
        (None, True, True, 0),
    ],
)
def test_logprobs_are_computed_where_an_output_shows_them(
    value: int | None, wants_list: bool, wants_sum: bool, computed: int | None
) -> None:
    request = parse(
        json.dumps({} if value is None else {"logprobs": value}),
        return_logprobs=flag(wants_list),
        return_cumulative_logprob=flag(wants_sum),
    )
    assert request.params.logprobs == computed
    assert request.num_logprobs == value
    assert (request.return_logprobs, request.return_cumulative_logprob) == (wants_list, wants_sum)
