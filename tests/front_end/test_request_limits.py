"""Requests that would cost too much are refused at once, and nothing that a client sends raises another error."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request_params import RequestParams
from tests.front_end.parsing import VOCAB_SIZE, params, parse, refusal, text_array
from tests.front_end.test_sampling_parameters import NEUTRAL


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
