"""JSON schemas that become parts of others: their references stay right."""

from __future__ import annotations

from typing import Any

from cb_backend.gateway.bodies import too_deep

_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # name -> schema
_VALUES = ("const", "enum", "default", "examples")  # are no schemas, whatever they look like


def moved_schema(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """A schema as it must read where it stands at `place` of a larger one, which is a JSON pointer such as "/items".

    References within the schema ("#", "#/$defs/A") are JSON pointers from the whole's root (RFC 6901; JSON Schema
    2020-12, 8.2.3). Raises `ApiError` for one that is nested too deeply.
    """
    try:
        return {name: _moved(name, part, place) for name, part in schema.items()}
    except RecursionError:
        raise too_deep() from None


def _moved(name: str, part: Any, place: str) -> Any:
    """A keyword's value."""
    if name == "$ref" and isinstance(part, str):
        return f"#{place}{part[1:]}" if part == "#" or part.startswith("#/") else part
    if name in _VALUES:
        return part
    if name in _BY_NAME and isinstance(part, dict):
        return {each: _moved("", schema, place) for each, schema in part.items()}
    if isinstance(part, dict):
        return {each: _moved(each, value, place) for each, value in part.items()}
    return [_moved("", each, place) for each in part] if isinstance(part, list) else part
