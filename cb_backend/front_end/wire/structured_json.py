"""The ways in which clients ask for structured output, to one `StructuredOutput`.

vLLM's `structured_outputs` and its older `guided_decoding` (an object, or JSON text of one: vllm_backend takes the
text), and the `guided_json`, `guided_regex`, ... of older clients. Exactly one grammar a request. Every failure is an
`InvalidRequestError`; whether a grammar compiles is found out by the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.structured_output import (
    ANY_JSON_OBJECT,
    MAX_CHOICE_BYTES,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_NESTING,
    StructuredOutput,
)
from cb_backend.front_end.wire.json_values import load_json, read_bool, read_text, show

_OBJECT_NAMES = ("structured_outputs", "guided_decoding")
_FLAT_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
STRUCTURED_NAMES = (*_OBJECT_NAMES, *_FLAT_NAMES)

# Options inside the objects that change nothing here at these values.
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "disable_fallback": (True, False),  # there is one library, so nothing to fall back to
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
    "structural_tag": (),
    "backend": ("auto", "guidance"),
    "_backend": ("", "auto", "guidance"),
    "_backend_was_auto": (True, False),
}


_WRAPPER_NAMES = {"name", "description", "strict", "schema"}


def read_structured_output(values: dict[str, Any]) -> StructuredOutput | None:
    """The one grammar among a request's parameters; None if there is none. null and "" ask for nothing.

    values: by name of `STRUCTURED_NAMES`, as the JSON had it.
    """
    found: dict[str, StructuredOutput] = {}
    for name, value in values.items():
        if _is_empty(value):
            continue
        if name in _OBJECT_NAMES:
            found |= _read_object(name, value)
        else:
            grammar = _READERS[_FLAT_NAMES[name]](name, value)
            if grammar is not None:
                found[name] = grammar
    if len(found) > 1:
        raise InvalidRequestError(f"structured output is asked for by {' and '.join(found)}; send one of them")
    for grammar in found.values():
        grammar.check()
        return grammar
    return None


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or value == []


def _read_object(name: str, value: Any) -> dict[str, StructuredOutput]:
    """The grammars in an object such as {"regex": "a+"}, by a name for error texts."""
    fields = _as_json(name, value) if isinstance(value, str) else value
    if not isinstance(fields, dict):
        raise InvalidRequestError(
            f'{name} must be an object such as {{"regex": "a+"}}, or its JSON text; got {show(value)}'
        )
    found = {}
    is_compact = False
    for key, entry in fields.items():
        if key in _READERS:
            grammar = None if _is_empty(entry) else _READERS[key](f"{name}.{key}", entry)
            if grammar is not None:
                found[f"{name}.{key}"] = grammar
        elif key == "disable_any_whitespace":
            is_compact = read_bool(f"{name}.{key}", entry)
        elif key not in _OPTIONS:
            known = ", ".join([*_READERS, "disable_any_whitespace"])
            raise InvalidRequestError(f"{name} has an unknown entry {show(key)}; it may have one of {known}")
        elif entry is not None and not any(entry is choice or entry == choice for choice in _OPTIONS[key]):
            raise InvalidRequestError(f"{name}.{key} is not supported (got {show(entry)}); remove it")
    if not found and fields:
        raise InvalidRequestError(f"{name} asks for nothing; give it one of {', '.join(_READERS)}, or leave it out")
    if not is_compact:
        return found
    return {key: StructuredOutput(kind=g.kind, text=g.text, is_compact=g.kind == "json") for key, g in found.items()}


# ---- one kind each -------------------------------------------------------------------------------------------------


def _read_schema(name: str, value: Any) -> StructuredOutput:
    """A JSON schema as an object or as JSON text. Its order is kept: properties are written in it."""
    schema = _unwrapped(name, _as_json(name, value) if isinstance(value, str) else value)
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{name} must be a JSON schema (an object, or JSON text of one), got {show(value)}")
    _check_nesting(name, schema)
    return StructuredOutput(kind="json", text=json.dumps(schema, separators=(",", ":")))


def _unwrapped(name: str, value: Any) -> Any:
    """The schema in OpenAI's `response_format` or its `json_schema`; anything else as it is.

    Taken for schemas, such wrappers would allow anything: JSON Schema ignores the names that it does not know.
    """
    if isinstance(value, dict) and value.get("type") == "json_schema" and isinstance(value.get("json_schema"), dict):
        value = value["json_schema"]
    if not isinstance(value, dict) or not value.keys() <= _WRAPPER_NAMES:
        return value
    schema = value.get("schema")
    if isinstance(schema, str):
        schema = _as_json(f"{name}.schema", schema)
    return schema if isinstance(schema, dict) else value


def _read_json_object(name: str, value: Any) -> StructuredOutput | None:
    return StructuredOutput(kind="json", text=ANY_JSON_OBJECT) if read_bool(name, value) else None


def _read_regex(name: str, value: Any) -> StructuredOutput:
    return StructuredOutput(kind="regex", text=read_text(name, value))


def _read_grammar(name: str, value: Any) -> StructuredOutput:
    return StructuredOutput(kind="grammar", text=read_text(name, value))


def _read_choice(name: str, value: Any) -> StructuredOutput | None:
    """A list of strings, or JSON text of one."""
    choices = _as_json(name, value) if isinstance(value, str) else value
    if choices == []:
        return None
    if not isinstance(choices, list):
        raise InvalidRequestError(f"{name} must be a list of strings, got {show(value)}")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequestError(f"{name} has {len(choices)} choices; at most {MAX_CHOICES} are allowed")
    for choice in choices:
        text = read_text(name, choice)
        if not 1 <= len(text.encode()) <= MAX_CHOICE_BYTES:
            raise InvalidRequestError(f"{name} must hold strings of 1 to {MAX_CHOICE_BYTES} bytes, got {show(text)}")
    return StructuredOutput(kind="choice", text=json.dumps(list(dict.fromkeys(choices)), separators=(",", ":")))


_READERS: dict[str, Callable[[str, Any], StructuredOutput | None]] = {
    "json": _read_schema,
    "regex": _read_regex,
    "choice": _read_choice,
    "grammar": _read_grammar,
    "json_object": _read_json_object,
}


# ---- values --------------------------------------------------------------------------------------------------------


def _as_json(name: str, text: str) -> Any:
    if len(text) > 2 * MAX_GRAMMAR_BYTES:  # JSON text of an object that holds JSON text grows by its escapes
        raise InvalidRequestError(f"{name} has {len(text)} characters; at most {MAX_GRAMMAR_BYTES} bytes are allowed")
    return load_json(name, text)


def _check_nesting(name: str, value: Any) -> None:
    """Level by level, so that depth costs no stack."""
    level, depth = [value], 0
    while level:
        if depth > MAX_NESTING:
            raise InvalidRequestError(f"{name} is nested too deeply; at most {MAX_NESTING} levels are allowed")
        children = [v for v in level if isinstance(v, dict | list)]
        level = [child for v in children for child in (v.values() if isinstance(v, dict) else v)]
        depth += bool(children)
