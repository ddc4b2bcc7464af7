"""What a client can send, right and wrong, and what becomes of it. Every failure is an `InvalidRequestError`."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request_params import RequestParams
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.front_end.wire.protocol import GenerateRequest, parse_request

VOCAB_SIZE = 500


def text_array(*values: bytes, shape: tuple[int, ...] | None = None) -> np.ndarray:
    array = np.array(values, dtype=np.object_)
    return array if shape is None else array.reshape(shape)


def flag(value: bool) -> np.ndarray:
    return np.array([value])


def parse(parameters: str = "", **inputs: np.ndarray) -> GenerateRequest:
    return parse_request({"text_input": text_array(b"hi"), **inputs}, parameters, VOCAB_SIZE)


def params(values: Any) -> RequestParams:
    """The sampling parameters that this JSON value gives."""
    return parse(sampling_parameters=text_array(json.dumps(values).encode())).params


def refusal(values: Any) -> str:
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    with pytest.raises(InvalidRequestError) as caught:
        parse(sampling_parameters=text_array(text))
    assert len(str(caught.value)) < 400
    return str(caught.value)


# ---- inputs -------------------------------------------------------------------------------------------------------


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


# ---- sampling parameters ------------------------------------------------------------------------------------------


def test_strings_are_coerced() -> None:
    given = {
        "max_tokens": "128",
        "min_tokens": "2",
        "temperature": "0.7",
        "top_p": "9e-1",
        "top_k": "-1",
        "min_p": ".1",
    }
    given |= {"seed": "7", "ignore_eos": "true", "include_stop_str_in_output": "False", "stop": "END"}
    assert params(given) == RequestParams(
        max_tokens=128, min_tokens=2, temperature=0.7, top_p=0.9, top_k=-1, min_p=0.1, seed=7,
        ignore_eos=True, include_stop_str_in_output=False, stop=("END",),
    )  # fmt: skip


def test_plain_values() -> None:
    given = {
        "max_tokens": 3.0,
        "temperature": 0,
        "seed": 2**64 - 1,
        "stop": ["a", "b", "a"],
        "stop_token_ids": [5, "6"],
    }
    assert params(given) == RequestParams(
        max_tokens=3, temperature=0.0, seed=2**64 - 1, stop=("a", "b"), stop_token_ids=(5, 6)
    )


def test_null_is_the_default() -> None:
    names = [
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "n",
    ]
    assert params(dict.fromkeys(names)) == RequestParams()


def test_a_missing_seed_is_drawn() -> None:
    given = [parse().params] * 10 + [params({"seed": -1}), params({"seed": None, "n": 2})]
    seeds = [rules.seed for each in given for rules in each.token_rules()]
    assert len(set(seeds)) == 13
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_request_parameters_are_sampling_parameters() -> None:
    assert parse('{"temperature": 0.5, "max_tokens": "9", "seed": 1}').params == RequestParams(
        temperature=0.5, max_tokens=9, seed=1
    )
    with pytest.raises(
        InvalidRequestError, match=r"unknown sampling parameter 'temprature'; did you mean 'temperature'"
    ):
        parse('{"temprature": 1}')


@pytest.mark.parametrize("value", [None, "", -1, 0, 2**31, 1.5, True, "1.5", "ten", [], {}, "1_000", "٣"])
def test_d7_bad_max_tokens(value: Any) -> None:
    assert "max_tokens" in refusal({"max_tokens": value})


def test_d7_missing_max_tokens_is_the_default_and_the_largest_is_allowed() -> None:
    assert params({}).most_tokens == 16
    assert params({"max_tokens": 2**31 - 1}).max_tokens == 2**31 - 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", v) for v in (999999, -0.1, float("nan"), float("inf"), True, [], "warm", "nan", "1e999", 10**39)]
    + [("top_p", v) for v in (-1, 0, 1.01, float("nan"), "", False)]
    + [("min_p", v) for v in (-0.1, 1.1, {})],
)
def test_h3_numbers_out_of_range(name: str, value: Any) -> None:
    assert name in refusal({name: value})


@pytest.mark.parametrize("value", [-0.0, "0.7", 2, 1e-45, 100])
def test_h3_numbers_in_range(value: Any) -> None:
    assert params({"temperature": value}).temperature == float(value)


WRONG_TYPES = [
    *[(name, value) for name in ("max_tokens", "min_tokens", "top_k", "seed") for value in ([1], {}, "x", 0.5, True)],
    *[(name, value) for name in ("temperature", "top_p", "min_p") for value in ([1], {"a": 1}, "x", False)],
    *[(name, value) for name in ("ignore_eos", "include_stop_str_in_output") for value in ([], {}, 2, "yes", 1.0)],
    *[("stop", value) for value in (1, True, {"a": 1}, [1], [None], [["a"]], [""], "")],
    *[("stop_token_ids", value) for value in (1, "1", [1.5], [True], ["x"], [None], [-1], [VOCAB_SIZE], {})],
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
def test_h6_wrong_types_are_named(name: str, value: Any) -> None:
    assert name in refusal({name: value})


def test_i1_top_k_above_the_vocabulary_passes() -> None:
    assert [params({"top_k": k}).top_k for k in (0, -1, 1, VOCAB_SIZE, VOCAB_SIZE + 1, 10**7)] == [
        0, -1, 1, VOCAB_SIZE, VOCAB_SIZE + 1, 10**7
    ]  # fmt: skip
    assert "top_k" in refusal({"top_k": -2})


def test_min_tokens_above_max_tokens() -> None:
    assert "min_tokens (20) is greater than max_tokens (16)" in refusal({"min_tokens": 20})


NEUTRAL = {
    "structured_outputs": None, "guided_json": None, "lora_name": None,
    "detokenize": True,
    "length_penalty": 1, "early_stopping": False, "use_beam_search": "false", "flat_logprobs": False,
    "logprob_token_ids": None, "logits_processors": [], "guided_decoding": None, "guided_regex": "",
    "guided_choice": [], "guided_grammar": "", "thinking_token_budget": None, "extra_args": {},
}  # fmt: skip
EFFECTIVE = {
    "guided_whitespace_pattern": " *", "guided_decoding_backend": "outlines",
    "detokenize": 0,
}  # fmt: skip


def test_parameters_that_are_not_built_pass_at_their_neutral_value() -> None:
    assert params({**NEUTRAL, "seed": 1}) == RequestParams(seed=1)


def test_an_adapter_is_named_by_text() -> None:
    assert [params({"lora_name": name}).lora_name for name in ("sql", "", None)] == ["sql", "", ""]
    assert refusal({"lora_name": 7}) == "lora_name must be a string, got 7"


@pytest.mark.parametrize("name", EFFECTIVE)
def test_parameters_that_are_not_built_are_refused_by_name(name: str) -> None:
    assert refusal({name: EFFECTIVE[name]}).startswith(f"{name} is not supported yet")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"presence_penalty": "1.5"}, {"presence_penalty": 1.5}),
        ({"frequency_penalty": -2}, {"frequency_penalty": -2.0}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"logit_bias": {"7": "-100", "499": 3}}, {"logit_bias": {7: -100.0, 499: 3.0}}),
        ({"allowed_token_ids": [3, "4", 3]}, {"allowed_token_ids": (3, 4)}),
        ({"bad_words": ["New York", "x"]}, {"bad_words": ("New York", "x")}),
        ({"bad_words": "x"}, {"bad_words": ("x",)}),
        # vLLM's values for "off"
        ({"presence_penalty": 0, "frequency_penalty": "0.0", "repetition_penalty": 1.0}, {}),
        ({"logit_bias": {}, "bad_words": [], "allowed_token_ids": None}, {}),
    ],
)
def test_logits_rules(values: Any, expected: Any) -> None:
    assert params({**values, "seed": 1}) == RequestParams(seed=1, **expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty must be between -2 and 2, got 2.1"),
        ({"frequency_penalty": "-3"}, "frequency_penalty must be between -2 and 2, got -3.0"),
        ({"repetition_penalty": 0}, "repetition_penalty must be at least 0.01, got 0; 1 turns it off"),
        ({"repetition_penalty": -1}, "repetition_penalty must be between 0 and 100, got -1.0"),
        ({"repetition_penalty": True}, "repetition_penalty must be a number, got True"),
        ({"logit_bias": [1]}, "logit_bias must be an object of token ids and numbers, got a list of 1 entries"),
        ({"logit_bias": {"a": 1}}, "a token id in logit_bias must be an integer, got 'a'"),
        ({"logit_bias": {"500": 1}}, "a token id in logit_bias must be between 0 and 499, got 500"),
        ({"logit_bias": {"5": 101}}, "a value in logit_bias must be between -100 and 100, got 101.0"),
        ({"logit_bias": {"5": None}}, "a value in logit_bias must be a number, got None"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias gives a token id more than once"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias has 301 entries; at most 300 are allowed"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty, so no token could be sampled; leave it out"),
        ({"allowed_token_ids": [500]}, "allowed_token_ids must be between 0 and 499, got 500"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list of token ids, got 5"),
        ({"bad_words": [1]}, "bad_words must hold strings only, got 1"),
        ({"bad_words": [" "]}, "each of bad_words must be a text of 1 to 256 bytes"),
        ({"bad_words": ["x" * 257]}, "each of bad_words must be a text of 1 to 256 bytes"),
        ({"bad_words": ["\ud800"]}, "bad_words holds a lone surrogate, which is not a character: '\\ud800'"),
        ({"bad_words": [str(i) for i in range(129)]}, "bad_words has 129 strings; at most 128 are allowed"),
        ({"bad_words_token_ids": [[1]]}, "unknown sampling parameter 'bad_words_token_ids'; did you mean"),
    ],
)
def test_bad_logits_rules_are_named(values: Any, message: str) -> None:
    assert refusal(values).startswith(message)


@pytest.mark.parametrize(("value", "meaning"), [(0, 0), (1, 1), (20, 20), ("3", 3), (None, None)])
def test_f6_logprobs_zero_is_not_off(value: Any, meaning: int | None) -> None:
    request = parse(json.dumps({"logprobs": value}), return_logprobs=flag(True))
    assert (request.num_logprobs, request.params.logprobs) == (meaning, meaning)


@pytest.mark.parametrize("value", [21, -1, 2**40])
def test_f6_logprobs_out_of_range(value: int) -> None:
    assert refusal({"logprobs": value}) == f"logprobs must be between 0 and 20, got {value}"


@pytest.mark.parametrize("value", [True, "true", 1.5, [1], "one"])
def test_true_is_not_one(value: Any) -> None:
    assert "n must be an integer, got" in refusal({"n": value})


def test_n() -> None:
    assert params({"n": "3", "seed": 5}) == RequestParams(n=3, seed=5)
    assert params({"n": 1, "temperature": 0, "seed": 5}) == RequestParams(temperature=0, seed=5)
    assert refusal({"n": 2, "temperature": 0}).startswith("n is 2, but at temperature 0 all answers are the same")


def test_each_answer_has_a_seed_of_its_own_and_the_first_is_that_of_one() -> None:
    several = RequestParams(n=3, seed=2**64 - 1, top_k=4)
    assert several.token_rules() == [TokenRules(seed=seed, top_k=4) for seed in (2**64 - 1, 0, 1)]
    assert several.token_rules()[:1] == RequestParams(seed=2**64 - 1, top_k=4).token_rules()


def test_unknown_names() -> None:
    assert refusal({"max_token": 5}) == "unknown sampling parameter 'max_token'; did you mean 'max_tokens'?"
    assert refusal({"zzz": 5}) == "unknown sampling parameter 'zzz'; remove it"
    assert "unknown sampling parameter" in refusal({"k" * 100_000: 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object, got a list of 0 entries"),
        (b"null", "must be a JSON object, got None"),
        (b'"temperature"', "must be a JSON object"),
        (b"3", "must be a JSON object"),
        (b'{"seed": 1, "seed": 2}', "'seed' more than once"),
        (b'{"logit_bias": {"1": 1, "1": 2}}', "'1' more than once"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "integer of 5000 digits"),
        (b'{"stop": "\\ud800"}', "lone surrogate"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 20_000, "nested too deeply"),
    ],
)
def test_bad_json(text: bytes, message: str) -> None:
    assert message in refusal(text)
    with pytest.raises(InvalidRequestError, match=r"^[^\n]*$"):
        parse(text.decode())


# ---- limits -------------------------------------------------------------------------------------------------------


def timed_refusal(values: Any) -> tuple[str, float]:
    text = json.dumps(values).encode()
    times = []
    for _ in range(3):
        start = time.thread_time()
        message = refusal(text)
        times.append(time.thread_time() - start)
    return message, min(times)


@pytest.mark.parametrize("num_stops", [500_000, 50_000, 17])
def test_b9_many_stop_strings_are_refused_at_once(num_stops: int) -> None:
    message, seconds = timed_refusal({"stop": ["a"] * num_stops})
    assert "at most" in message
    assert "16" in message
    assert seconds < 0.05


@pytest.mark.parametrize("values", [{"bad_words": ["a"] * 50_000}, {f"k{i}": 1 for i in range(10_000)}])
def test_b9_other_long_lists(values: Any) -> None:
    message, seconds = timed_refusal(values)
    assert "has 50000 strings; at most" in message or "unknown sampling parameter 'k0'" in message
    assert seconds < 0.05


def test_b9_many_duplicate_names() -> None:
    text = b"{" + b",".join(b'"k%d":1' % (i // 2) for i in range(10_000)) + b"}"
    start = time.thread_time()
    assert "more than once" in refusal(text)
    assert time.thread_time() - start < 0.1


def test_b9_long_stop_strings() -> None:
    assert params({"stop": ["é" * 512]}).stop == ("é" * 512,)
    assert "1026 bytes; at most 1024" in refusal({"stop": ["é" * 513]})
    assert len(params({"stop": ["\u0001" * 1023 + chr(97 + i) for i in range(16)]}).stop) == 16


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"n": 10**6}, "n must be between 1 and 64, got 1000000"),
        ({"n": 65}, "n must be between 1 and 64, got 65"),
        ({"n": 0}, "n must be between 1 and 64, got 0"),
        ({"best_of": 10**9}, "best_of is not supported (got 1000000000); use n and choose"),
        ({"n": 10**30}, "n must be between 1 and 64"),
    ],
)
def test_x1_a_million_answers_are_refused(values: Any, reason: str) -> None:
    message, seconds = timed_refusal(values)
    assert message.startswith(reason)
    assert seconds < 0.01


def test_too_many_stop_token_ids() -> None:
    assert "65 ids; at most 64" in refusal({"stop_token_ids": [1] * 65})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([*RequestParams.__struct_fields__, *NEUTRAL]) | st.text(max_size=12)


def answer(text: bytes) -> RequestParams | str:
    """The parameters, or the text of the refusal; anything else that is raised fails the test."""
    try:
        return parse(sampling_parameters=text_array(text)).params
    except InvalidRequestError as error:
        return str(error)


@given(values=st.dictionaries(names, json_values, max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_json_gives_parameters_or_a_clear_refusal(values: dict[str, Any]) -> None:
    result = answer(json.dumps(values).encode())
    if isinstance(result, str):
        assert 0 < len(result.encode("utf-8")) < 400
    else:
        result.check(VOCAB_SIZE)
        for rules in result.token_rules():
            rules.check(VOCAB_SIZE)
        assert set(values) <= {*RequestParams.__struct_fields__, *NEUTRAL}


@given(text=st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_parameters_or_a_clear_refusal(text: bytes) -> None:
    result = answer(text)
    if isinstance(result, str):
        assert 0 < len(result.encode("utf-8")) < 400
    else:
        assert isinstance(json.loads(text), dict)
