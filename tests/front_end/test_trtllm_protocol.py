"""TensorRT-LLM's tensors, translated: pytest tests/front_end/test_trtllm_protocol.py"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.structured_output import ANY_JSON_OBJECT, StructuredOutput
from cb_backend.front_end.wire.protocol import GenerateRequest
from cb_backend.front_end.wire.trtllm_protocol import parse_trtllm_request

VOCAB_SIZE = 500
TYPES = {
    "max_tokens": np.int32, "min_tokens": np.int32, "min_length": np.int32, "end_id": np.int32, "pad_id": np.int32,
    "top_k": np.int32, "beam_width": np.int32, "num_return_sequences": np.int32, "num_draft_tokens": np.int32,
    "seed": np.uint64, "random_seed": np.uint64, "lora_task_id": np.uint64,
    "lora_weights": np.float16, "lora_config": np.int32,
    "temperature": np.float32, "top_p": np.float32, "repetition_penalty": np.float32, "presence_penalty": np.float32,
    "frequency_penalty": np.float32, "length_penalty": np.float32, "embedding_bias_weights": np.float32,
}  # fmt: skip


def tensor(name: str, value: Any) -> Any:
    """As a client sends it: a batch dimension in front."""
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], str):
        return np.array([[text.encode() for text in values]], dtype=np.object_)
    return np.array([values], dtype=np.bool_ if isinstance(values[0], bool) else TYPES[name])


def parse(**values: Any) -> GenerateRequest:
    inputs = {"text_input": "hello", **values}
    return parse_trtllm_request({name: tensor(name, value) for name, value in inputs.items()}, VOCAB_SIZE)


def test_every_parameter_has_its_effect() -> None:
    generate = parse(
        max_tokens=7, min_tokens=2, temperature=0.5, top_k=3, top_p=0.75, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=0.25, seed=2**63, num_return_sequences=2, stop_words=["a", "b c"], bad_words=["x", ""],
        return_num_input_tokens=True, return_num_output_tokens=True, exclude_input_in_output=True,
    )  # fmt: skip
    params = generate.params
    assert (generate.text, generate.is_stream, generate.is_input_prepended) == ("hello", False, False)
    assert (params.max_tokens, params.min_tokens, params.n, params.seed) == (7, 2, 2, 2**63)
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 3, 0.75)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, 0.5, 0.25)
    assert (params.stop, params.bad_words) == (("a", "b c"), ("x",))
    assert generate.return_num_input_tokens
    assert generate.return_num_output_tokens


def test_greedy_unless_sampling_is_asked_for() -> None:
    assert parse().params.temperature == 0.0
    assert parse(top_k=0, top_p=0.0).params.temperature == 0.0
    assert parse(temperature=0.7).params.temperature == pytest.approx(0.7)
    assert (parse(top_p=0.9).params.temperature, parse(top_k=5).params.temperature) == (1.0, 1.0)
    assert (parse(top_k=5, top_p=0.0).params.top_p, parse(top_p=0.9, top_k=0).params.top_k) == (1.0, 0)


def test_older_names() -> None:
    assert parse(min_length=3, max_tokens=5).params.min_tokens == 3
    assert parse(random_seed=9).params.seed == 9
    assert parse(min_length=3, min_tokens=3).params.min_tokens == 3
    with pytest.raises(InvalidRequestError, match=r"'min_(length|tokens)' contradicts its other name"):
        parse(min_length=3, min_tokens=4)


def test_an_adapter_is_named_and_never_sent() -> None:
    assert [parse(lora_name=name).params.lora_name for name in ("sheep", "")] == ["sheep", ""]
    for name, value in (("lora_task_id", 3), ("lora_weights", [[0.5]]), ("lora_config", [[0, 0, 8]])):
        with pytest.raises(InvalidRequestError, match=f"input '{name}' is not supported.*named, by 'lora_name'"):
            parse(**{name: value})
    with pytest.raises(InvalidRequestError, match="lora_name must be a string, got a list"):
        parse(lora_name=["sheep", "doll"])


def test_the_end_token_takes_the_place_of_the_models() -> None:
    params = parse(end_id=17, pad_id=0).params
    assert (params.stop_token_ids, params.ignore_eos) == ((17,), True)
    params = parse(end_id=-1).params
    assert (params.stop_token_ids, params.ignore_eos) == ((), True)
    assert not parse().params.ignore_eos
    with pytest.raises(InvalidRequestError, match="500"):
        parse(end_id=500)


def test_a_stream_never_repeats_the_prompt() -> None:
    for values in ({}, {"exclude_input_in_output": False}, {"exclude_input_in_output": True}):
        assert not parse(stream=True, **values).is_input_prepended
    assert parse(stream=False).is_input_prepended


def test_a_model_may_leave_the_prompt_out_unless_a_request_asks() -> None:
    def is_prepended(**inputs: bool) -> bool:
        arrays = {"text_input": np.array([[b"hi"]], dtype=np.object_)}
        arrays |= {name: np.array([[value]]) for name, value in inputs.items()}
        return parse_trtllm_request(arrays, 384, is_input_excluded=True).is_input_prepended

    assert not is_prepended()
    assert is_prepended(exclude_input_in_output=False)
    assert not is_prepended(exclude_input_in_output=False, stream=True)


NEUTRAL = {
    "beam_width": 1, "length_penalty": 1.0, "return_log_probs": False, "return_context_logits": False,
    "return_generation_logits": False, "return_perf_metrics": False, "num_draft_tokens": 0, "use_draft_logits": False,
    "lora_task_id": 0, "embedding_bias_words": [""], "embedding_bias_weights": [0.0],
    "guided_decoding_guide_type": "", "guided_decoding_guide": "",
}  # fmt: skip
EFFECTIVE = {
    "beam_width": 4, "length_penalty": 0.5, "return_log_probs": True, "return_context_logits": True,
    "return_generation_logits": True, "return_perf_metrics": True, "num_draft_tokens": 3, "use_draft_logits": True,
    "lora_task_id": 8, "lora_weights": [[0.5]], "lora_config": [[0, 1, 8]],
    "embedding_bias_words": ["cat"], "embedding_bias_weights": [2.0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "guide", "expected"),
    [
        ("json", "", StructuredOutput(kind="json", text=ANY_JSON_OBJECT)),
        ("json_schema", '{"type": "null"}', StructuredOutput(kind="json", text='{"type":"null"}')),
        ("regex", "a+é", StructuredOutput(kind="regex", text="a+é")),
        ("ebnf_grammar", 'root ::= "a"', StructuredOutput(kind="grammar", text='root ::= "a"')),
    ],
)
def test_guides(kind: str, guide: str, expected: StructuredOutput) -> None:
    values = {"guided_decoding_guide_type": kind} | ({"guided_decoding_guide": guide} if guide else {})
    assert parse(**values).params.structured_output == expected


@pytest.mark.parametrize(
    ("kind", "guide", "message"),
    [
        ("structural_tag", "{}", "'structural_tag', which is not supported; use json, json_schema"),
        ("", "a+", "input 'guided_decoding_guide_type' is ''"),
        ("regex", "", "'guided_decoding_guide' is missing; send the regex"),
        ("json_schema", "{", "structured_outputs.json: not valid JSON"),
    ],
)
def test_guides_that_are_refused(kind: str, guide: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        parse(guided_decoding_guide_type=kind, guided_decoding_guide=guide)


def test_what_is_not_built_passes_where_it_asks_for_nothing() -> None:
    assert parse(**NEUTRAL, seed=1) == parse(seed=1)


@pytest.mark.parametrize("name", EFFECTIVE)
def test_what_is_not_built_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"input '{name}' is not supported"):
        parse(**{name: EFFECTIVE[name]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": [1, 2]}, r"'max_tokens' must have exactly one element, got shape \[1, 2\]"),
        ({"text_input": ["a", "b"]}, r"'text_input' must have exactly one element"),
        ({"max_tokens": 0}, "max_tokens must be between 1 and"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": float("inf")}, "top_p"),
    ],
)
def test_bad_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse(**values)


def test_words_that_are_no_text() -> None:
    inputs = {"text_input": tensor("text_input", "a"), "stop_words": np.array([[b"\xff"]], dtype=np.object_)}
    with pytest.raises(InvalidRequestError, match="'stop_words' must hold UTF-8"):
        parse_trtllm_request(inputs, VOCAB_SIZE)
