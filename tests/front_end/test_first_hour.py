"""What a new user sends in the first hour, over either wire: parameters have their effect, or are refused by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request_params import RequestParams
from cb_backend.contracts.structured_output import StructuredOutput
from cb_backend.contracts.token_rules import MAX_TOKENS
from cb_backend.front_end.wire.protocol import parse_request
from cb_backend.front_end.wire.trtllm_protocol import parse_trtllm_request

VOCAB_SIZE = 500


def texts(*values: str) -> np.ndarray:
    return np.array([value.encode() for value in values], dtype=np.object_)


def params(request: dict[str, Any], sampling: dict[str, Any] | None = None) -> RequestParams:
    """Of a request with these request parameters, and these in the input `sampling_parameters`."""
    inputs = {"text_input": texts("hi")}
    if sampling is not None:
        inputs["sampling_parameters"] = texts(json.dumps(sampling))
    return parse_request(inputs, json.dumps(request), VOCAB_SIZE).params


def trtllm_params(**inputs: np.ndarray) -> RequestParams:
    return parse_trtllm_request({"text_input": texts("hi"), **inputs}, VOCAB_SIZE).params


# ---- H01: parameters in both places -------------------------------------------------------------------------------


def test_h01_request_parameters_count_beside_the_input() -> None:
    assert params({"max_tokens": 3, "seed": 1}, {"temperature": 0}) == RequestParams(
        max_tokens=3, seed=1, temperature=0
    )


def test_h01_the_input_wins_where_both_name_a_parameter() -> None:
    given = params({"max_tokens": 3, "top_k": 9, "seed": 1}, {"max_tokens": 5, "top_k": None})
    assert given == RequestParams(max_tokens=5, top_k=0, seed=1)


def test_h01_an_empty_object_in_the_input_turns_nothing_off() -> None:
    assert params({"max_tokens": 3, "seed": 1}, {}) == RequestParams(max_tokens=3, seed=1)


@pytest.mark.parametrize(
    ("request_parameters", "sampling", "name"),
    [
        ({"max_tokns": 3}, {"temperature": 0}, "max_tokns"),
        ({"temperature": 0}, {"max_tokns": 3}, "max_tokns"),
        ({"best_of": 2}, {}, "best_of"),
        ({"top_p": 7}, {"max_tokens": 3}, "top_p"),
    ],
)
def test_h01_what_has_no_effect_is_refused_in_both(
    request_parameters: dict[str, Any], sampling: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        params(request_parameters, sampling)


def test_h01_the_same_in_both_is_once() -> None:
    """Clients of vllm_backend send the tensor and, beside it, the same parameters."""
    both = {"max_tokens": "8", "temperature": "0.1", "top_p": "0.95", "seed": "1", "guided_regex": "a+"}
    assert params(both, both) == params({}, both)


def test_h01_scheduling_parameters_are_merged_too() -> None:
    inputs = {"text_input": texts("hi"), "sampling_parameters": texts('{"timeout_ms": 7}')}
    scheduling = parse_request(inputs, '{"priority": 2, "timeout_ms": 9}', VOCAB_SIZE).scheduling
    assert (scheduling.priority, scheduling.timeout_ms) == (2, 7)


def test_h01_a_grammar_by_another_name_in_each_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"guided_regex and structured_outputs\.regex; send one of them"):
        params({"guided_regex": "a"}, {"structured_outputs": {"regex": "b"}})


def test_h01_bad_json_names_its_place() -> None:
    with pytest.raises(InvalidRequestError, match="request parameters: not valid JSON"):
        parse_request({"text_input": texts("hi"), "sampling_parameters": texts("{}")}, "{", VOCAB_SIZE)


# ---- H02: JSON text of a list or an object ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"stop": '["8"]'}, {"stop": ("8",)}),
        ({"stop": ' [ "a", "b" ] '}, {"stop": ("a", "b")}),
        ({"stop": "[]"}, {}),
        ({"bad_words": '["8", "New York"]'}, {"bad_words": ("8", "New York")}),
        ({"stop_token_ids": "[5, 6, 5]"}, {"stop_token_ids": (5, 6)}),
        ({"allowed_token_ids": '[5, "6"]'}, {"allowed_token_ids": (5, 6)}),
        ({"logit_bias": '{"7": -100, "8": 1.5}'}, {"logit_bias": {7: -100.0, 8: 1.5}}),
        ({"guided_choice": '["yes", "no"]', "max_tokens": 9},
         {"structured_output": StructuredOutput(kind="choice", text='["yes","no"]'), "max_tokens": 9}),
        ({"guided_choice": "[]"}, {}),
        ({"extra_args": "{}", "logits_processors": "[]"}, {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["request", "input"])
def test_h02_json_text_of_lists_and_objects(given: dict[str, Any], expected: dict[str, Any], place: str) -> None:
    given = {**given, "seed": 1}
    found = params(given) if place == "request" else params({}, given)
    assert found == RequestParams(**expected, seed=1)


@pytest.mark.parametrize("text", ["8", "[", '["8"', "[1]", "[citation needed]", '"8"', '{"a": 1}', "[" * 5000])
@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_h02_other_text_stands_for_itself(name: str, text: str) -> None:
    short = text[:200]
    assert getattr(params({name: short}), name) == (short,)


def test_h02_a_list_is_never_looked_into() -> None:
    assert params({}, {"stop": ['["8"]'], "bad_words": ['["8"]']}).stop == ('["8"]',)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop_token_ids": "[5,"}, "stop_token_ids: not valid JSON"),
        ({"stop_token_ids": '{"5": 1}'}, "stop_token_ids must be a list of token ids, got a JSON object"),
        ({"allowed_token_ids": "5, 6"}, "allowed_token_ids must be a list of token ids, got '5, 6'"),
        ({"logit_bias": "[1]"}, "logit_bias must be an object of token ids and numbers, got a list"),
        ({"logit_bias": '{"1": 1, "1": 2}'}, "logit_bias: '1' more than once in one object"),
        ({"stop": json.dumps([str(i) for i in range(17)])}, "stop has 17 strings; at most 16"),
        ({"stop": '["\\ud800"]'}, "stop holds a lone surrogate"),
        ({"extra_args": '{"a": 1}'}, "extra_args is not supported yet"),
    ],
)
def test_h02_bad_json_text_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        params(given)
    assert str(caught.value).startswith(message)


def test_h02_tensorrt_llms_words() -> None:
    given = trtllm_params(stop_words=texts('["8", "9"]'), bad_words=texts('["8"]'))
    assert (given.stop, given.bad_words) == (("8", "9"), ("8",))
    given = trtllm_params(stop_words=texts('["8"]', "x"), bad_words=texts("8", ""))
    assert (given.stop, given.bad_words) == (('["8"]', "x"), ("8",))


# ---- H04: how long an answer of a grammar may be ------------------------------------------------------------------


@pytest.mark.parametrize(
    "grammar",
    [{"guided_regex": "a+"}, {"structured_outputs": '{"json_object": true}'}, {"guided_choice": '["yes"]'}],
)
def test_h04_a_grammar_without_max_tokens_has_the_room_there_is(grammar: dict[str, Any]) -> None:
    assert params(grammar).most_tokens == MAX_TOKENS
    assert params({}, grammar).token_rules()[0].max_tokens == MAX_TOKENS


def test_h04_max_tokens_counts_beside_a_grammar() -> None:
    assert params({"guided_regex": "a+", "max_tokens": 5}).most_tokens == 5
    assert params({"guided_regex": "a+"}, {"max_tokens": "7"}).most_tokens == 7


def test_h04_what_asks_for_no_grammar_has_the_usual_length() -> None:
    assert params({"guided_regex": "", "structured_outputs": None, "guided_choice": "[]"}).most_tokens == 16


def test_h04_min_tokens_may_be_above_the_usual_length() -> None:
    assert params({"guided_regex": "a+", "min_tokens": 20}).min_tokens == 20


def test_h04_tensorrt_llms_guides() -> None:
    given = trtllm_params(guided_decoding_guide_type=texts("json"))
    assert given.most_tokens == MAX_TOKENS


# ---- R70b: strings of tensors in messages -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shown"),
    [("Paris", "'Paris'"), ("Zürich", r"'Z\xfcrich'"), ("x" * 100, "'" + "x" * 59 + "...")],
)
def test_r70b_a_bad_string_is_shown_as_text(name: str, shown: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        trtllm_params(embedding_bias_words=texts(name))
    assert f"input 'embedding_bias_words' is not supported (got {shown})" in str(caught.value)


def test_r70b_no_message_shows_bytes() -> None:
    for inputs in (
        {"guided_decoding_guide_type": texts("Paris")},
        {"embedding_bias_words": texts("", "Paris")},
        {"beam_width": texts("Paris")},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            trtllm_params(**inputs)
        assert "'Paris'" in str(caught.value)
        assert "b'" not in str(caught.value)
