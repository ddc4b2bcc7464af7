"""Mistral's form of calls. Source: the chat templates of its models."""

from __future__ import annotations

from cb_backend.gateway.events import CallArguments, CallStart, Content, Event, held_length
from cb_backend.gateway.json_calls import JsonCall, ObjectScan


class MistralParser:
    """Mistral: `[TOOL_CALLS]` and a JSON list of calls, or (newer) `name[ARGS]{...}` or `name{...}` for each.

    The mark is a control token, so it must be in the text (`skip_special_tokens` false).
    """

    _MARK, _ARGS = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._buffer = ""  # of text before the calls
        self._name = ""  # of the call that comes
        self._is_calling = False
        self._in_list = False
        self._call: JsonCall | None = None
        self._arguments: ObjectScan | None = None  # of a call whose name has come
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        if not self._is_calling:
            position = self._buffer.find(self._MARK)
            if position < 0:
                safe = len(self._buffer) - held_length(self._buffer, (self._MARK,))
                safe = len(self._buffer[:safe].rstrip())
                if safe:
                    events.append(Content(self._buffer[:safe]))
                    self._buffer = self._buffer[safe:]
                return events
            before = self._buffer[:position].rstrip()
            if before:
                events.append(Content(before))
            self._buffer, self._is_calling = self._buffer[position + len(self._MARK) :], True
        read, self._buffer = self._buffer, ""
        for character in read:
            events += self._read(character)
        return events

    def _read(self, character: str) -> list[Event]:
        events: list[Event] = []
        if self._call is not None:
            if self._call.takes(character):
                return self._read_listed(self._call, character)
            events += self._call.close()
            self._num_calls += self._call.is_started
            self._call = None
        if self._arguments is not None:
            return self._read_arguments(self._arguments, character)
        if character == "[" and self._num_calls == 0 and not self._name.strip():
            self._in_list = True
        elif self._in_list:
            if character == "{":
                self._call = JsonCall(self._num_calls, self._names, is_marked=True)
                return [*events, *self._read_listed(self._call, character)]
        elif character == "{":
            name = self._name.replace(self._MARK, "").strip().removesuffix(self._ARGS).strip()
            self._name, self._arguments = "", ObjectScan()
            return [CallStart(self._num_calls, name), *self._read_arguments(self._arguments, character)]
        else:
            self._name += character
        return events

    def _read_listed(self, call: JsonCall, character: str) -> list[Event]:
        events = call.push(character)
        if call.is_complete:
            self._num_calls += call.is_started
            self._call = None
        return events

    def _read_arguments(self, arguments: ObjectScan, character: str) -> list[Event]:
        arguments.push(character)
        event = CallArguments(self._num_calls, character)
        if arguments.is_complete:
            self._num_calls, self._arguments = self._num_calls + 1, None
        return [event]

    def finish(self) -> list[Event]:
        text = self._buffer if not self._is_calling else ""
        events = self._call.finish() if self._call is not None and self._call.is_started else []
        self._buffer, self._call = "", None
        return [*events, Content(text)] if text else events
