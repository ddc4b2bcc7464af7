"""The spellings in which clients ask for structured output, and what is refused before anything is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.structured_output import (
    ANY_JSON_OBJECT,
    MAX_CHOICE_BYTES,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_NESTING,
    StructuredOutput,
)
from cb_backend.front_end.wire.sampling_json import read_params

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def parse(**values: Any) -> StructuredOutput | None:
    return read_params(values, vocab_size=100)[0].structured_output


def refusal(**values: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        parse(**values)
    return str(caught.value)


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
@pytest.mark.parametrize("is_text", [False, True], ids=["object", "text"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"json": SCHEMA}, StructuredOutput(kind="json", text=SCHEMA_TEXT)),
        ({"json": json.dumps(SCHEMA, indent=2)}, StructuredOutput(kind="json", text=SCHEMA_TEXT)),
        ({"json": {}, "disable_any_whitespace": True}, StructuredOutput(kind="json", text="{}", is_compact=True)),
        ({"regex": r"\d{3}"}, StructuredOutput(kind="regex", text=r"\d{3}")),
        ({"choice": ["yes", "no", "yes"]}, StructuredOutput(kind="choice", text='["yes","no"]')),
        ({"grammar": 'root ::= "a"'}, StructuredOutput(kind="grammar", text='root ::= "a"')),
        ({"json_object": True}, StructuredOutput(kind="json", text=ANY_JSON_OBJECT)),
        ({"json": SCHEMA, "regex": None, "choice": None, "json_object": False, "disable_fallback": True,
          "backend": None, "whitespace_pattern": None}, StructuredOutput(kind="json", text=SCHEMA_TEXT)),
        ({}, None),
    ],
)  # fmt: skip
def test_objects_and_their_text(name: str, is_text: bool, fields: dict[str, Any], expected: StructuredOutput) -> None:
    """vllm_backend takes JSON text inside the JSON, newer clients the object itself."""
    assert parse(**{name: json.dumps(fields) if is_text else fields}) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("guided_json", SCHEMA, StructuredOutput(kind="json", text=SCHEMA_TEXT)),
        ("guided_json", SCHEMA_TEXT, StructuredOutput(kind="json", text=SCHEMA_TEXT)),
        ("guided_regex", "a+", StructuredOutput(kind="regex", text="a+")),
        ("guided_choice", ["a"], StructuredOutput(kind="choice", text='["a"]')),
        ("guided_choice", '["a", "b"]', StructuredOutput(kind="choice", text='["a","b"]')),
        ("guided_grammar", 'start: "a"', StructuredOutput(kind="grammar", text='start: "a"')),
        ("guided_json_object", "true", StructuredOutput(kind="json", text=ANY_JSON_OBJECT)),
        ("guided_json", None, None),
        ("guided_regex", "", None),
        ("guided_choice", [], None),
        ("structured_outputs", "", None),
    ],
)
def test_older_names(name: str, value: Any, expected: StructuredOutput | None) -> None:
    assert parse(**{name: value}) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "asked for by guided_regex and guided_choice; send one"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex and structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "structured_outputs.regex and guided_regex"),
        ({"structured_outputs": "{"}, "structured_outputs: not valid JSON"),
        ({"structured_outputs": 5}, "structured_outputs must be an object such as"),
        (
            {"structured_outputs": {"regexp": "a"}},
            "structured_outputs has an unknown entry 'regexp'; it may have one of",
        ),
        ({"structured_outputs": {"disable_fallback": True}}, "structured_outputs asks for nothing"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}}, "whitespace_pattern is not supported"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag is not supported"),
        ({"guided_decoding": {"regex": "a", "backend": "outlines"}}, "guided_decoding.backend is not supported"),
        ({"guided_json": "{"}, "guided_json: not valid JSON"),
        ({"guided_json": '{"a": 1, "a": 2}'}, "guided_json: 'a' more than once"),
        ({"guided_json": 7}, "guided_json must be a JSON schema"),
        ({"guided_json": "[]"}, "guided_json must be a JSON schema"),
        ({"guided_regex": 7}, "guided_regex must be a string, got 7"),
        ({"guided_regex": " "}, "the regex is empty"),
        ({"guided_regex": "\ud800"}, "guided_regex holds a lone surrogate"),
        ({"guided_regex": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, f"at most {MAX_GRAMMAR_BYTES} are allowed"),
        ({"guided_grammar": "a" * (MAX_GRAMMAR_BYTES + 1)}, f"the grammar has {MAX_GRAMMAR_BYTES + 1} bytes"),
        ({"guided_choice": {"a": 1}}, "guided_choice must be a list of strings"),
        ({"guided_choice": ["a", 1]}, "guided_choice must be a string, got 1"),
        ({"guided_choice": ["a", ""]}, "guided_choice must hold strings of 1 to"),
        ({"guided_choice": ["a" * (MAX_CHOICE_BYTES + 1)]}, f"strings of 1 to {MAX_CHOICE_BYTES} bytes"),
        ({"guided_choice": [str(i) for i in range(MAX_CHOICES + 1)]}, f"at most {MAX_CHOICES} are allowed"),
        ({"guided_json_object": "maybe"}, "guided_json_object must be true or false"),
    ],
)
def test_shape_and_limits_are_checked_with_name_value_and_remedy(values: dict[str, Any], message: str) -> None:
    assert message in refusal(**values)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_w1_deep_nesting_is_refused_at_once() -> None:
    """Case W1: as an object, as text, and as text in text; the deepest that is allowed passes."""
    assert parse(guided_json=nested(MAX_NESTING - 1)) is not None
    for levels in (MAX_NESTING, 500):
        for value in (nested(levels), json.dumps(nested(levels))):
            assert "guided_json is nested too deeply; at most 64 levels" in refusal(guided_json=value)
    brackets = '{"items":' * 5000 + "{}" + "}" * 5000
    for values in ({"guided_json": brackets}, {"structured_outputs": '{"json": ' + brackets + "}"}):
        assert "nested too deeply" in refusal(**values)


def test_a_schema_of_the_greatest_size_passes_even_as_text_in_text() -> None:
    names = [f"property_{i:05}" for i in range(2900)]
    schema = {"enum": names}
    text = json.dumps(schema, separators=(",", ":"))
    assert MAX_GRAMMAR_BYTES * 0.7 < len(text) <= MAX_GRAMMAR_BYTES
    structured = parse(structured_outputs=json.dumps({"json": text}))
    assert structured is not None
    assert json.loads(structured.text) == schema


@pytest.mark.parametrize(
    "wrapper",
    [
        {"name": "person", "strict": True, "schema": SCHEMA},
        {"name": "person", "schema": SCHEMA, "description": "someone"},
        {"schema": SCHEMA},
        {"name": "person", "schema": SCHEMA_TEXT},
        {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}},
    ],
)
def test_r32h_the_wrapper_of_a_schema_is_taken_off(wrapper: dict[str, Any]) -> None:
    expected = StructuredOutput(kind="json", text=SCHEMA_TEXT)
    for value in (wrapper, json.dumps(wrapper)):
        assert parse(guided_json=value) == expected
        assert parse(structured_outputs={"json": value}) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"schema": {"type": "object"}, "name": {"type": "string"}}},
        {"name": "person", "strict": True},
        {"type": "object", "schema": {"type": "integer"}},
        {"name": "person", "schema": True},
    ],
)
def test_r32h_a_schema_that_is_no_wrapper_stays(schema: dict[str, Any]) -> None:
    assert parse(guided_json=schema) == StructuredOutput(kind="json", text=json.dumps(schema, separators=(",", ":")))


def test_r32h_a_wrapped_schema_is_checked_like_any_other() -> None:
    wrapper = {"name": "deep", "schema": nested(MAX_NESTING)}
    assert "guided_json is nested too deeply" in refusal(guided_json=wrapper)
