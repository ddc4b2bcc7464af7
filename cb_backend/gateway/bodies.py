"""The bodies of requests: JSON objects whose fields are read one by one, with errors that name the field."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

from cb_backend.gateway.errors import ApiError, bad_request

T = TypeVar("T")
_NAMES = {str: "a string", bool: "true or false", int: "a whole number", list: "a list", dict: "an object"}


def read_body(data: bytes) -> Body:
    """Raises `ApiError` where the body is no JSON object."""
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {_kind(value)}")
    return Body(value)


def write_json(value: Any) -> str:
    """A part of a body as JSON text, for the server. Letters stay as they are: as escapes they would take up to three
    times the bytes. Raises `ApiError` for one that is nested so deeply that it could be read, but not written."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise too_deep() from None


def too_deep() -> ApiError:
    return bad_request("the body is nested too deeply")


class Body:
    """Fields that have not been taken yet are `left`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.left = {name: value for name, value in values.items() if value is not None}  # null: not given

    def take(self, name: str, kind: type[T]) -> T | None:
        """The field's value, or None if it is not given. Raises `ApiError` for another type."""
        value = self.left.pop(name, None)
        if value is None:
            return None
        # A bool is an int for Python, and for no client.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise bad_request(f"{name!r} must be {_NAMES[kind]}, not {_kind(value)}", name)
        return value

    def need(self, name: str, kind: type[T]) -> T:
        value = self.take(name, kind)
        if value is None:
            raise bad_request(f"{name!r} is missing", name)
        return value

    def drop(self, *names: str) -> None:
        for name in names:
            self.left.pop(name, None)

    def refuse(self, name: str, reason: str, neutral: tuple[Any, ...] = ()) -> None:
        """Refuses the field unless its value asks for nothing. Raises `ApiError`."""
        value = self.left.pop(name, None)
        if value is not None and value not in neutral:
            raise bad_request(f"{name!r} is not supported: {reason}", name)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    for kind, text in _NAMES.items():
        if isinstance(value, kind):
            return text
    return "a number" if isinstance(value, float) else type(value).__name__


def check_size(num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise ApiError(413, f"the body is larger than {most} bytes; the gateway's --max-body-mib allows more")
