"""Requests for embeddings and scores: what clients can send, right and wrong, and what becomes of the numbers."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.pooling import ModelTasks, PoolingRules
from cb_backend.front_end.text.pooled import filled, finished, pooled_token_ids
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.front_end.wire.pooling_request import PoolingRequest, asks_for_pooling, check_generates, parse_pooling
from cb_backend.front_end.wire.protocol import parse_request
from tests.fakes.counting_runner import write_byte_tokenizer

VOCAB_SIZE = 500
EMBEDS = ModelTasks(can_generate=False, embedding_size=8, pooling="mean", dimensions=(2, 4))
CLASSIFIES = ModelTasks(can_generate=False, labels=("bad", "good"))
RANKS = ModelTasks(can_generate=False, score_token_ids=(7, 9))
GENERATES = ModelTasks()


def texts(*values: str) -> np.ndarray[Any, Any]:
    return np.array([value.encode() for value in values], dtype=np.object_)


def parse(tasks: ModelTasks, asked: Any = None, parameters: str = "", **inputs: Any) -> PoolingRequest:
    """`asked` is a value or JSON text of the input `pooling`; the text is "hi" where no other prompt is given."""
    if asked is not None:
        inputs["pooling"] = texts(asked if isinstance(asked, str) else json.dumps(asked))
        if "input_ids" not in inputs:
            inputs.setdefault("text_input", texts("hi"))
    assert asks_for_pooling(inputs)
    return parse_pooling(inputs, parameters, VOCAB_SIZE, tasks, "llm")


def refusal(tasks: ModelTasks, asked: Any = None, parameters: str = "", **inputs: Any) -> str:
    with pytest.raises(InvalidRequestError) as error:
        parse(tasks, asked, parameters, **inputs)
    return str(error.value)


def embedding_request(**values: Any) -> np.ndarray[Any, Any]:
    return texts(json.dumps(values))


def test_defaults_are_the_models() -> None:
    request = parse(EMBEDS, {})
    assert (request.task, request.rules, request.dimensions) == ("embed", PoolingRules(pooling="mean"), None)
    assert request.is_normalized
    assert parse(CLASSIFIES, {}).rules == PoolingRules(readout="classifier")
    assert parse(CLASSIFIES, {}).activation == "softmax"
    assert parse(RANKS, {}).rules == PoolingRules(readout="head", token_ids=(7, 9))
    own = parse(EMBEDS, {"task": "embed", "pooling": "last", "dimensions": "4", "normalize": "false"})
    assert (own.rules, own.dimensions, own.is_normalized) == (PoolingRules(), 4, False)
    assert parse(RANKS, {"activation": False}).activation == "none"
    assert parse(EMBEDS, {"dimensions": None, "task": None}).dimensions is None, "null is not given"


def test_vllm_backends_form() -> None:
    request = parse(EMBEDS, embedding_request=embedding_request(input="hi", pooling_params={}), text_input=texts(""))
    assert (request.text, request.is_json, request.input_ids) == ("hi", True, None)
    request = parse(EMBEDS, embedding_request=embedding_request(input=[3, 4], pooling_params={"dimensions": [4]}))
    assert (request.input_ids, request.dimensions) == ([3, 4], 4)
    for values, told in (
        ({"input": []}, "input must be a text or a list of token ids, got a list of 0 entries"),
        ({"input": ["a", "b"]}, "input must be a text or a list of token ids"),
        ({"input": [500]}, "token id 500 in 'input' is outside the vocabulary"),
        ({"input": [2**40]}, "outside the vocabulary"),
        ({"input": [True]}, "input must be a text or a list of token ids"),
        ({"input": "a", "model": "x"}, "unknown key 'model'"),
        ({"input": "a", "pooling_params": {"dimensions": [2, 4]}}, "dimensions must be an integer"),
        ({"input": "a", "pooling_params": {"task": "score"}}, "an object with dimensions alone"),
    ):
        with pytest.raises(InvalidRequestError, match=told):
            parse(EMBEDS, embedding_request=embedding_request(**values))


@pytest.mark.parametrize(("tasks", "asked", "told"), [
    (GENERATES, {}, "Model llm does not support 'embed' request; it serves generate"),
    (GENERATES, {"task": "score"}, "does not support 'score' request"),
    (EMBEDS, {"task": "score"}, "does not support 'score' request; it serves embed"),
    (CLASSIFIES, {"task": "score"}, "does not support 'score' request; it serves classify"),
    (EMBEDS, {"task": "rank"}, "task must be one of embed, classify, score, got 'rank'"),
    (EMBEDS, {"dimensions": 0}, "dimensions must be between 1 and 8, got 0"),
    (EMBEDS, {"dimensions": 9}, "dimensions must be between 1 and 8, got 9"),
    (EMBEDS, {"dimensions": 3}, "dimensions of this model are 2, 4, got 3"),
    (EMBEDS, {"dimensions": 2.5}, "dimensions must be an integer"),
    (EMBEDS, {"pooling": "cls"}, "pooling must be last or mean, got 'cls'"),
    (CLASSIFIES, {"pooling": "mean"}, "pooling must be last, with which classifiers are trained"),
    (EMBEDS, {"activation": True}, "'activation' does not go with the task 'embed'"),
    (CLASSIFIES, {"dimensions": 2}, "'dimensions' does not go with the task 'classify'"),
    (EMBEDS, {"dim": 2}, "unknown key 'dim'"),
    (EMBEDS, "[1]", "must be a JSON object"),
    (EMBEDS, "{", "not valid JSON"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(tasks: ModelTasks, asked: Any, told: str) -> None:
    assert told in refusal(tasks, asked)


def test_inputs_that_do_not_go_together() -> None:
    ids = np.array([1], np.int32)
    assert "one of 'text_input' and 'input_ids'" in refusal(EMBEDS, {}, text_input=texts("a"), input_ids=ids)
    assert "'text_pair' holds documents" in refusal(EMBEDS, {}, text_pair=texts("a"))
    assert "'text_pair' holds documents" in refusal(RANKS, {}, input_ids=ids, text_pair=texts("a"))
    assert "'text_pair' has 0 elements" in refusal(RANKS, {}, text_pair=texts())
    assert "input 'messages' does not go with" in refusal(EMBEDS, {}, messages=texts("[]"))
    assert "'return_logprobs' is about tokens" in refusal(EMBEDS, {}, return_logprobs=np.array([True]))
    assert "hold no text" in refusal(EMBEDS, {}, exclude_input_in_output=np.array([False]))
    assert "leave 'text_input' empty" in refusal(
        EMBEDS, embedding_request=embedding_request(input="a"), text_input=texts("b")
    )
    assert "both given" in refusal(EMBEDS, {}, embedding_request=embedding_request(input="a"))
    with pytest.raises(InvalidRequestError, match="'text_pair' goes with the input 'pooling' alone"):
        parse_request({"text_input": texts("a"), "text_pair": texts("b")}, "", VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match="does not support 'generate' request; it serves embed"):
        check_generates(EMBEDS, "llm")


def test_parameters_of_the_queue_and_no_others() -> None:
    request = parse(EMBEDS, {}, '{"priority": 3, "tenant": "a", "truncate_prompt_tokens": 5, "temperature": null}')
    assert (request.scheduling.priority, request.scheduling.tenant, request.truncate_prompt_tokens) == (3, "a", 5)
    assert parse(EMBEDS, {}, '{"lora_name": "legal"}').lora_name == "legal"
    for parameters in ('{"temperature": 0}', '{"max_tokens": 1}', '{"guided_json": {}}', '{"nonsense": 1}'):
        assert "does not go with embeddings and scores" in refusal(EMBEDS, {}, parameters)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
@settings(max_examples=150, deadline=None)
def test_any_value_of_any_key_is_taken_or_refused(value: Any) -> None:
    for tasks in (EMBEDS, CLASSIFIES, RANKS):
        for asked in (value, *({key: value} for key in ("task", "pooling", "dimensions", "normalize", "activation"))):
            with contextlib.suppress(InvalidRequestError):
                parse(tasks, json.dumps(asked))


@pytest.mark.parametrize(("tasks", "asked", "values", "expected"), [
    (EMBEDS, {}, [3.0, 4.0, 0.0], [0.6, 0.8, 0.0]),
    (EMBEDS, {"dimensions": 2}, [3.0, 4.0, 12.0], [0.6, 0.8]),
    (EMBEDS, {"normalize": False}, [3.0, 4.0], [3.0, 4.0]),
    (EMBEDS, {}, [0.0, 0.0], [0.0, 0.0]),
    (EMBEDS, {}, [3e-30, 4e-30], [0.6, 0.8]),
    (CLASSIFIES, {}, [0.0, np.log(3.0)], [0.25, 0.75]),
    (CLASSIFIES, {}, [1000.0, 0.0], [1.0, 0.0]),
    (CLASSIFIES, {"activation": False}, [-2.0, 5.0], [-2.0, 5.0]),
    (RANKS, {}, [0.0, np.log(3.0)], [0.75]),
    (RANKS, {}, [-900.0, 900.0], [1.0]),
    (RANKS, {"activation": False}, [1.0, 3.5], [2.5]),
])  # fmt: skip
def test_numbers_as_the_client_wants_them(tasks: ModelTasks, asked: Any, values: Any, expected: Any) -> None:
    found = finished(parse(tasks, asked), np.array(values, np.float32))
    assert found.dtype == np.float32
    assert found == pytest.approx(expected, abs=1e-6)


def test_pairs_as_token_ids(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    request = parse(RANKS, {"task": "score"}, text_input=texts("q{document}"), text_pair=texts("one", "{query}"))
    plain = pooled_token_ids(request, tokenizer, 100, None)
    assert [tokenizer.decode(ids) for ids in plain] == ["q{document}one", "q{document}{query}"]
    framed = pooled_token_ids(request, tokenizer, 100, "Q {query} D {document}!")
    assert [tokenizer.decode(ids) for ids in framed] == ["Q q{document} D one!", "Q q{document} D {query}!"]
    with pytest.raises(
        InvalidRequestError, match=r"text_pair\[0\]: the text has \d+ tokens; the model takes at most 9"
    ):
        pooled_token_ids(request, tokenizer, 9, None)
    short = parse(RANKS, {}, '{"truncate_prompt_tokens": -1}', text_pair=texts("one"))
    assert len(pooled_token_ids(short, tokenizer, 3, None)[0]) == 3
    assert filled("{document}{query}{document}", "{document}", "d") == "d{document}d"
