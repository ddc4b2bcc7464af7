"""Calls of tools that are written as JSON objects, read while they are written.

A call is `{"name": ..., "arguments": {...}}` (Llama: "parameters"). Its name is said as soon as it is certain and its
arguments as they come: what is said is the model's own JSON text, never parsed and written anew.

An answer may be JSON that is no call. Without a mark that says "a call" an object is one if it names a function that
is offered and has arguments. Behind a mark either will do: a function that nobody offers is the client's to refuse, as
the model's next turn can mend it, and one without arguments is called without.

Small models miscount braces. Arguments are over where their own object is, so that a brace which is missing after them
costs nothing: the call is over where something comes that cannot be of it.
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
    """One object, character by character. `raw` is all of it so far.

    `names`: of the functions that are offered. `is_marked`: a mark has said that it is a call.
    """

    def __init__(self, index: int, names: frozenset[str], is_marked: bool) -> None:
        self.raw = ""
        self.is_started = False  # it is a call, and its name has been said
        self._index = index
        self._names = names
        self._is_marked = is_marked
        self._scan = ObjectScan()
        self._key: str | None = None  # of the value that is being read, at depth 1
        self._part = ""  # key or value that is being read, at depth 1
        self._name: str | None = None
        self._arguments = ""  # come, but not said yet
        self._has_arguments = False  # have begun
        self._is_after_arguments = False  # and before what follows them
        self._is_argument_whole = False  # no object, but JSON text of one as a string, or null

    @property
    def is_complete(self) -> bool:
        return self._scan.is_complete

    @property
    def is_in_text(self) -> bool:
        """Whether the next character is of a text in the object, whatever it is."""
        return self._scan.is_in_text

    @property
    def is_no_call(self) -> bool:
        """Whether nothing that may come makes it one."""
        is_foreign = bool(self._name) and self._name not in self._names and not self._is_marked
        return not self.is_started and (self.is_complete or is_foreign)

    def takes(self, character: str) -> bool:
        """Whether it can be of this object. If not, the brace that ends it is missing: `close` it, and read on."""
        if self._scan.is_in_text or self._scan.depth != 1:
            return True
        if self._is_after_arguments:
            return character in ",}" or character.isspace()
        if self._key is None and not self._part.strip():  # a key is due
            return character in '",}' or character.isspace()
        return character != "]"

    def push(self, character: str) -> list[Event]:
        self.raw += character
        if self._is_after_arguments and character not in ",}":
            return []  # of no part of the object: white space, or the beginning of a mark that was cut
        was_in_text, was_inside = self._scan.is_in_text, self._scan.depth > 0
        self._scan.push(character)
        is_at_top = self._scan.depth == 1
        if was_in_text or self._scan.is_in_text:
            self._read(character)
        elif self._scan.is_complete:
            self._end_value()
        elif is_at_top and character == ":" and self._key is None:
            self._begin_value()
        elif is_at_top and character == ",":
            self._end_value()
        elif was_inside and not (is_at_top and character.isspace()):
            self._read(character)
        return self._news()

    def close(self) -> list[Event]:
        """The object is over, although no brace has said so."""
        self._end_value()
        self._scan.is_complete = True
        return self._news()

    def finish(self) -> list[Event]:
        """The answer is over: arguments in a text that has come as a whole are said."""
        return self.close() if self._is_after_arguments else []

    def _begin_value(self) -> None:
        self._key, self._part = _text(self._part), ""
        if self._key in _ARGUMENTS and self._has_arguments:  # a call has them once
            self._key = ""

    def _read(self, character: str) -> None:
        if self._key not in _ARGUMENTS:
            self._part += character
            return
        if not self._has_arguments:
            self._has_arguments, self._is_argument_whole = True, character not in "{["
        if self._is_argument_whole:
            self._part += character
        else:
            self._arguments += character
        self._is_after_arguments = self._scan.depth == 1 and not self._scan.is_in_text and character in '}]"'

    def _end_value(self) -> None:
        if self._key == _NAME:
            self._name = self._name or _text(self._part)
        elif self._key in _ARGUMENTS and self._is_argument_whole:
            text = "" if self._part == "null" else _text(self._part)
            self._arguments += self._part if text is None else text
        self._key, self._part, self._is_after_arguments = None, "", False

    def _news(self) -> list[Event]:
        if not self._name or not (self.is_started or self._is_call(self._name)):
            return []
        events: list[Event] = []
        if not self.is_started:
            self.is_started = True
            events.append(CallStart(self._index, self._name))
        if self._arguments:
            events.append(CallArguments(self._index, self._arguments))
            self._arguments = ""
        return events

    def _is_call(self, name: str) -> bool:
        is_offered = name in self._names
        if self._is_marked:
            return is_offered or self._has_arguments
        return is_offered and self._has_arguments


def _text(part: str) -> str | None:
    try:
        value = json.loads(part)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
