"""Calls of tools that are written as JSON objects, read while they are written.

A call is `{"name": ..., "arguments": {...}}` (Llama: "parameters"). Its name is said as soon as it is known and its
arguments as they come: what is said is the model's own JSON text, never parsed and written anew.
"""

from __future__ import annotations

import json

from cb_backend.gateway.events import CallArguments, CallStart, Event

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """One object, character by character. `raw` is all of it so far."""

    def __init__(self, index: int) -> None:
        self.raw = ""
        self.is_complete = False
        self.is_started = False  # its name has been said
        self._index = index
        self._depth = 0
        self._is_in_text = False
        self._is_escaped = False
        self._key: str | None = None  # of the value that is being read, at depth 1
        self._part = ""  # key or value that is being read, at depth 1
        self._name: str | None = None
        self._arguments = ""  # come, but not said yet
        self._has_arguments = False  # have begun
        self._is_argument_text = False  # JSON text of the arguments inside of a JSON string

    def push(self, character: str) -> list[Event]:
        self.raw += character
        if self._is_in_text:
            self._read(character)
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_in_text = False
        elif character == '"':
            self._is_in_text = True
            self._read(character)
        elif character in "{[":
            self._depth += 1
            if self._depth > 1:
                self._read(character)
        elif character in "}]":
            self._depth -= 1
            if self._depth > 0:
                self._read(character)
            else:
                self._end_value()
                self.is_complete = True
        elif self._depth == 1 and character == ":" and self._key is None:
            self._key, self._part = _text(self._part), ""
        elif self._depth == 1 and character == ",":
            self._end_value()
        elif self._depth > 1 or not character.isspace():
            self._read(character)
        return self._news()

    def _read(self, character: str) -> None:
        if self._depth < 1:
            return
        if self._key in _ARGUMENTS:
            if not self._has_arguments:
                self._has_arguments, self._is_argument_text = True, character == '"'
            if not self._is_argument_text:
                self._arguments += character
                return
        self._part += character

    def _end_value(self) -> None:
        if self._key == _NAME:
            self._name = _text(self._part)
        elif self._key in _ARGUMENTS and self._is_argument_text:
            self._arguments += _text(self._part) or ""
        self._key, self._part = None, ""

    def _news(self) -> list[Event]:
        if not self._name:
            return []
        events: list[Event] = []
        if not self.is_started:
            self.is_started = True
            events.append(CallStart(self._index, self._name))
        if self._arguments:
            events.append(CallArguments(self._index, self._arguments))
            self._arguments = ""
        return events


def _text(part: str) -> str | None:
    try:
        value = json.loads(part)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class ArgumentsObject:
    """A JSON object that is a call's arguments by itself, its name having come before."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._is_in_text = False
        self._is_escaped = False

    def push(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_in_text:
            self._is_escaped = character == "\\"
            self._is_in_text = character != '"'
        elif character == '"':
            self._is_in_text = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_complete = self._depth == 0
