"""Calls of tools that are written as JSON objects, read while they are written.

A call is `{"name": ..., "arguments": {...}}` (Llama: "parameters"). Its name is said as soon as it is known and its
arguments as they come: what is said is the model's own JSON text, never parsed and written anew.
"""

from __future__ import annotations

import json

from cb_backend.gateway.events import CallArguments, CallStart, Event

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")


class ObjectScan:
    """Where the characters of a JSON object stand: how deep, and whether in a text."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_in_text = False
        self.is_complete = False
        self._is_escaped = False

    def push(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self.is_in_text:
            self._is_escaped = character == "\\"
            self.is_in_text = character != '"'
        elif character == '"':
            self.is_in_text = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
            self.is_complete = self.depth == 0


class JsonCall:
    """One object, character by character. `raw` is all of it so far."""

    def __init__(self, index: int) -> None:
        self.raw = ""
        self.is_started = False  # its name has been said
        self._index = index
        self._scan = ObjectScan()
        self._key: str | None = None  # of the value that is being read, at depth 1
        self._part = ""  # key or value that is being read, at depth 1
        self._name: str | None = None
        self._arguments = ""  # come, but not said yet
        self._has_arguments = False  # have begun
        self._is_argument_whole = False  # no object, but JSON text of one as a string, or null

    @property
    def is_complete(self) -> bool:
        return self._scan.is_complete

    def push(self, character: str) -> list[Event]:
        self.raw += character
        was_in_text, was_inside = self._scan.is_in_text, self._scan.depth > 0
        self._scan.push(character)
        is_at_top = self._scan.depth == 1
        if was_in_text or self._scan.is_in_text:
            self._read(character)
        elif self._scan.is_complete:
            self._end_value()
        elif is_at_top and character == ":" and self._key is None:
            self._key, self._part = _text(self._part), ""
        elif is_at_top and character == ",":
            self._end_value()
        elif was_inside and not (is_at_top and character.isspace()):
            self._read(character)
        return self._news()

    def _read(self, character: str) -> None:
        if self._key in _ARGUMENTS:
            if not self._has_arguments:
                self._has_arguments, self._is_argument_whole = True, character not in "{["
            if not self._is_argument_whole:
                self._arguments += character
                return
        self._part += character

    def _end_value(self) -> None:
        if self._key == _NAME:
            self._name = _text(self._part)
        elif self._key in _ARGUMENTS and self._is_argument_whole:
            text = "" if self._part == "null" else _text(self._part)
            self._arguments += self._part if text is None else text
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
