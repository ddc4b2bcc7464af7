"""Mistral's form of calls. Source: the chat templates of its models."""

from __future__ import annotations

import re

from cb_backend.gateway.events import CallArguments, CallStart, Content, Event, held_length, mark_at
from cb_backend.gateway.json_calls import JsonCall, ObjectScan

_SPACE = " \t\r\n"
_BETWEEN = _SPACE + ",}"  # calls of a list, with braces too many
_STRAY = _BETWEEN + "]"  # after a call: no content either


class MistralParser:
    """Mistral: `[TOOL_CALLS]` and a JSON list of calls, or (newer) `name[ARGS]{...}` or `name{...}` behind each mark.

    Before `[ARGS]` there may be `[CALL_ID]` and the model's own id of the call, which is dropped: the gateway gives
    every call an id. A mark that stands in a JSON text is of that text; anywhere else it ends the call before.

    What never becomes a call is content, and so is all that follows it up to the next mark. The mark itself is none:
    it is a control token, which must be in the text for this parser only (`skip_special_tokens` false).
    """

    _MARK, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
    # A name begins and ends with what is no space, so that no run of spaces can be read in two ways.
    _HEADER = re.compile(r"(?P<name>[^\[\s](?:[^\[]*[^\[\s])?)?\s*(\[CALL_ID\][^\[]*)?(\[ARGS\]\s*)?")

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._buffer = ""
        self._skipped = ""  # characters that are no content until another one comes
        self._has_spoken = False  # there was content
        self._lead = ""  # white space before the mark: content, should no call follow
        self._pending: str | None = None  # what has come since the mark or the list's last call; None: text is read
        self._in_list = False
        self._call: JsonCall | None = None  # of a list
        self._arguments: ObjectScan | None = None  # of a call whose name has come
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        while self._buffer:
            is_more = self._read_text(events) if self._pending is None else self._read_calls(events)
            if not is_more:
                break
        return events

    def _read_text(self, events: list[Event]) -> bool:
        """Whether a mark has come."""
        self._buffer = self._buffer.lstrip(self._skipped)
        position = self._buffer.find(self._MARK)
        end = len(self._buffer) - held_length(self._buffer, (self._MARK,)) if position < 0 else position
        text = self._buffer[:end].rstrip()  # white space before a call is no content
        if text:
            events.append(Content(text))
            self._has_spoken, self._skipped = True, ""
        if position < 0:
            self._buffer = self._buffer[len(text) :]
            return False
        self._lead, self._pending, self._in_list = self._buffer[len(text) : position], "", False
        self._buffer = self._buffer[position + len(self._MARK) :]
        return True

    def _read_calls(self, events: list[Event]) -> bool:
        """Whether calls are over: text follows, or a mark."""
        for position, character in enumerate(self._buffer):
            mark = None if self._is_in_json_text() else mark_at(self._buffer, position, (self._MARK,))
            if mark == "":
                self._buffer = self._buffer[position:]
                return False
            given = self._read(character, events) if mark is None else self._end_at_mark(events)
            if given is not None:
                self._give_back(given, self._buffer[position if mark else position + 1 :])
                return True
        self._buffer = ""
        return False

    def _is_in_json_text(self) -> bool:
        if self._call is not None:
            return self._call.is_in_text
        return self._arguments is not None and self._arguments.is_in_text

    def _give_back(self, given: str, rest: str) -> None:
        """Goes on with text: what has come of no call, and what follows it."""
        if not self._has_spoken and not self._num_calls:
            self._skipped = _SPACE  # between the mark and the answer's first word
        self._buffer, self._pending = self._lead + given + rest, None

    def _read(self, character: str, events: list[Event]) -> str | None:
        """What is of no call, where calls are over; None: they are not."""
        assert self._pending is not None
        if self._arguments is not None:
            return self._read_arguments(self._arguments, character, events)
        if self._call is not None:
            if self._call.takes(character):
                events += self._call.push(character)
                return self._end_listed(self._call) if self._call.is_complete else None
            events += self._call.close()
            if (given := self._end_listed(self._call)) is not None:
                return given + character
        is_first = not self._pending.strip()
        if character == "{" and (is_first or self._in_list):  # a single call may stand without its list
            self._in_list, self._call = True, JsonCall(self._num_calls, self._names, is_marked=True)
            events += self._call.push(character)
            return None
        if character == "{" and (name := self._named()):
            self._pending, self._arguments = "", ObjectScan()
            events.append(CallStart(self._num_calls, name))
            return self._read_arguments(self._arguments, character, events)
        self._pending += character
        if character == "[" and is_first and not self._in_list:
            self._in_list = True
            return None
        may_go_on = character in _BETWEEN if self._in_list else character != "{" and self._may_be_named()
        return None if may_go_on else self._pending

    def _read_arguments(self, arguments: ObjectScan, character: str, events: list[Event]) -> str | None:
        arguments.push(character)
        events.append(CallArguments(self._num_calls, character))
        return self._count_call() if arguments.is_complete else None

    def _end_listed(self, call: JsonCall) -> str | None:
        """As `_read`; other calls of the list may follow a call, but not what is none."""
        assert self._pending is not None
        if not call.is_started:
            self._call = None
            return self._pending + call.raw
        self._pending = self._count_call()
        return None

    def _count_call(self) -> str:
        self._num_calls, self._skipped = self._num_calls + 1, _STRAY
        self._call = self._arguments = None
        return ""

    def _end_at_mark(self, events: list[Event]) -> str:
        """What is of no call, as `_read` has it."""
        assert self._pending is not None
        if self._call is not None:
            events += self._call.close()
            return self._end_listed(self._call) or ""
        return self._pending if self._arguments is None else self._count_call()

    def _named(self) -> str:
        """The function that is named before an object; empty if it is none of a call."""
        match = self._HEADER.fullmatch((self._pending or "").lstrip())
        return (match["name"] or "") if match else ""

    def _may_be_named(self) -> bool:
        """Whether what has come may be a function's name and what stands behind it: names are words, or offered."""
        assert self._pending is not None
        name, bracket, rest = self._pending.partition("[")
        name, behind = name.strip(), bracket + rest
        is_name = len(name.split()) <= 1 or any(offered.startswith(name) for offered in self._names)
        return is_name and any(behind.startswith(mark) or mark.startswith(behind) for mark in (self._ID, self._ARGS))

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._arguments is not None:
            events += [CallArguments(self._num_calls, self._buffer)] if self._buffer else []
            self._buffer = self._count_call()
        elif self._call is not None and self._call.is_started:
            for character in self._buffer:
                events += self._call.push(character)
            events += self._call.finish()
            self._buffer = self._count_call()
        elif self._pending is not None:
            raw = self._call.raw if self._call is not None else ""
            self._give_back(self._pending + raw, self._buffer)
        text, self._buffer, self._pending = self._buffer.lstrip(self._skipped), "", None
        return [*events, Content(text)] if text else events
