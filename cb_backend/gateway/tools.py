"""Parsers of the forms in which models write calls of tools. Sources: the chat templates of the families named."""

from __future__ import annotations

from cb_backend.gateway.events import CallArguments, CallStart, Content, Event, held_length
from cb_backend.gateway.json_calls import JsonCall


class HermesParser:
    """Hermes, Qwen: `<tool_call>{...}</tool_call>`, any number of them, text before and between."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._buffer = ""
        self._call: JsonCall | None = None
        self._lead = ""  # what came before the call's object: content, should it turn out to be no call
        self._num_calls = 0
        self._is_after_call = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._buffer += text
        while self._buffer:
            if self._call is not None:
                events += self._read_call(self._call)
            elif not self._read_text(events):
                break
        return events

    def _read_text(self, events: list[Event]) -> bool:
        """Whether a call has begun."""
        if self._is_after_call:
            self._buffer = self._buffer.lstrip()
            if self._buffer.startswith(self._CLOSE):
                self._buffer = self._buffer[len(self._CLOSE) :].lstrip()
            elif self._CLOSE.startswith(self._buffer):
                return False
            if not self._buffer:
                return False
            if self._OPEN.startswith(self._buffer):
                return False
            self._is_after_call = False
        position = self._buffer.find(self._OPEN)
        if position < 0:
            safe = len(self._buffer) - held_length(self._buffer, (self._OPEN,))
            safe = len(self._buffer[:safe].rstrip())  # white space before a call is no content
            if safe:
                events.append(Content(self._buffer[:safe]))
                self._buffer = self._buffer[safe:]
            return False
        before = self._buffer[:position].rstrip()
        if before:
            events.append(Content(before))
        self._lead = self._buffer[len(before) : position] + self._OPEN
        self._buffer = self._buffer[position + len(self._OPEN) :]
        self._call = JsonCall(self._num_calls)
        return True

    def _read_call(self, call: JsonCall) -> list[Event]:
        events: list[Event] = []
        for position, character in enumerate(self._buffer):
            if not call.raw and character != "{":
                if character.isspace():
                    self._lead += character
                    continue
                self._call, self._buffer = None, self._buffer[position:]
                return [Content(self._lead)]
            events += call.push(character)
            if call.is_complete:
                self._buffer = self._buffer[position + 1 :]
                self._end_call(call, events)
                return events
        self._buffer = ""
        return events

    def _end_call(self, call: JsonCall, events: list[Event]) -> None:
        if call.is_started:
            self._num_calls += 1
        else:
            events.append(Content(self._lead + call.raw))
        self._call, self._is_after_call = None, True

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._call is not None and not self._call.is_started:
            events.append(Content(self._lead + self._call.raw))
        elif self._call is None and not self._is_after_call and self._buffer:
            events.append(Content(self._buffer))
        self._buffer, self._call = "", None
        return events


class JsonParser:
    """Llama 3: the answer is a call's JSON object, or some of them with `;` between, perhaps after `<|python_tag|>`.

    An answer that begins otherwise, or whose first object has no name, is content.
    """

    _TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._held = ""  # from the beginning, while it may be a call
        self._is_content = False
        self._call: JsonCall | None = None
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        if self._is_content:
            return [Content(text)] if text else []
        events: list[Event] = []
        for position, character in enumerate(text):
            if self._call is None and not self._begins(character):
                if self._is_content:
                    rest, self._held = self._held + text[position + 1 :], ""
                    events.append(Content(rest))
                    return events
                continue
            events += self._push_call(character)
        return events

    def _begins(self, character: str) -> bool:
        """Whether a call's object begins with this character."""
        if character == "{" and self._held.strip(" \n\t;") in ("", self._TAG):
            self._call = JsonCall(self._num_calls)
            return True
        self._held += character
        start = self._held.strip(" \n\t;")
        is_open = self._TAG.startswith(start) or (start.startswith(self._TAG) and not start[len(self._TAG) :].strip())
        if self._num_calls == 0 and not is_open:
            self._is_content = True
        return False

    def _push_call(self, character: str) -> list[Event]:
        assert self._call is not None
        events = self._call.push(character)
        if self._call.is_complete:
            if self._call.is_started:
                self._num_calls += 1
                self._held = ""
            else:
                events.append(Content(self._held + self._call.raw))
                self._held, self._is_content = "", self._num_calls == 0
            self._call = None
        return events

    def finish(self) -> list[Event]:
        text = self._held if self._num_calls == 0 else ""
        if self._call is not None and not self._call.is_started:
            text += self._call.raw
        self._held, self._call = "", None
        return [Content(text)] if text else []


class NamedCall:
    """The answer is the arguments of a function that the request has named."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_started = False

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        start: list[Event] = [] if self._is_started else [CallStart(0, self._name)]
        self._is_started = True
        return [*start, CallArguments(0, text)]

    def finish(self) -> list[Event]:
        return []


class RequiredCalls:
    """The answer is a JSON list of calls, by the grammar that the request was given."""

    def __init__(self) -> None:
        self._call: JsonCall | None = None
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        for character in text:
            if self._call is None:
                if character != "{":
                    continue
                self._call = JsonCall(self._num_calls)
            events += self._call.push(character)
            if self._call.is_complete:
                self._num_calls, self._call = self._num_calls + 1, None
        return events

    def finish(self) -> list[Event]:
        return []
