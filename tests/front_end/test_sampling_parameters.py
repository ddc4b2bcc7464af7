"""Sampling parameters as clients send them, right and wrong, and what becomes of each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request_params import RequestParams
from cb_backend.contracts.token_rules import TokenRules
from tests.front_end.parsing import VOCAB_SIZE, flag, params, parse, refusal


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
