"""Parsers of the forms in which models write calls of tools. Sources: the chat templates of the families named."""

from __future__ import annotations

from cb_backend.gateway.events import CallArguments, CallStart, Content, Event, held_length, mark_at
from cb_backend.gateway.json_calls import JsonCall


class HermesParser:
    """Hermes, Qwen: `<tool_call>{...}</tool_call>`, any number of them, text before and between.

    An object in marks that is no call (`json_calls` says which) is content with its marks, as it was written.
    A mark that stands in a JSON text is of that text. Anywhere else in a call it ends the call, finished or not:
    arguments that the model has not finished stay as they are, since what is missing in them is a guess.
    """

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
    _MARKS = (_OPEN, _CLOSE)
    _STRAY = " \t\r\n}]"  # what may stand between a call and its mark

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._buffer = ""
        self._call: JsonCall | None = None
        self._lead = ""  # what came before the call's object: content, should it turn out to be no call
        self._num_calls = 0
        self._is_after_call = False
        self._is_close_due = False  # of the call before

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._buffer += text
        while self._buffer:
            is_more = self._read_text(events) if self._call is None else self._read_call(self._call, events)
            if not is_more:
                break
        return events

    def _read_text(self, events: list[Event]) -> bool:
        """Whether a call has begun."""
        if self._is_after_call and not self._skip_after_call():
            return False
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
        self._call = JsonCall(self._num_calls, self._names, is_marked=True)
        return True

    def _skip_after_call(self) -> bool:
        """Drops the mark that ends a call, with braces too many before it. Whether something else has come."""
        if self._is_close_due:
            rest = self._buffer.lstrip(self._STRAY)
            mark = mark_at(rest, 0, self._MARKS)
            if mark == "":
                return False
            if mark is not None:
                self._buffer, self._is_close_due = rest.removeprefix(self._CLOSE), False
        self._buffer = self._buffer.lstrip()
        if mark_at(self._buffer, 0, (self._OPEN,)) == "":
            return False
        self._is_after_call = False
        return True

    def _read_call(self, call: JsonCall, events: list[Event]) -> bool:
        """Whether the call is over."""
        for position, character in enumerate(self._buffer):
            if not call.raw and character != "{":
                if character.isspace():
                    self._lead += character
                    continue
                self._call, self._buffer = None, self._buffer[position:]
                events.append(Content(self._lead))
                return True
            mark = None if call.is_in_text else mark_at(self._buffer, position, self._MARKS)
            if mark == "":
                self._buffer = self._buffer[position:]
                return False
            if mark is not None or not call.takes(character):
                events += call.close()
                self._buffer = self._buffer[position:]
                self._end_call(call, events)
                return True
            events += call.push(character)
            if call.is_complete:
                self._buffer = self._buffer[position + 1 :]
                self._end_call(call, events)
                return True
        self._buffer = ""
        return False

    def _end_call(self, call: JsonCall, events: list[Event]) -> None:
        if call.is_started:
            self._num_calls += 1
            self._is_after_call = self._is_close_due = True
        else:
            events.append(Content(self._lead + call.raw))
        self._call = None

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._call is not None and self._call.is_started:
            events += self._call.finish()
        elif self._call is not None:
            events.append(Content(self._lead + self._call.raw + self._buffer))
        elif not self._is_after_call and self._buffer:
            events.append(Content(self._buffer))
        self._buffer, self._call = "", None
        return events


class JsonParser:
    """Llama 3: the answer is a call's JSON object, or some of them with `;` between, perhaps after `<|python_tag|>`.

    What is no call (`json_calls` says which objects are; the tag is a mark) is content, and so is all that follows it.
    """

    _TAG = "<|python_tag|>"
    _BETWEEN = " \t\r\n;"
    _STRAY = _BETWEEN + "}]"  # after a call: a brace too many is none of the content either

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""  # since the call before, while it may lead to another
        self._is_content = False
        self._is_marked = False
        self._call: JsonCall | None = None
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        for position, character in enumerate(text):
            if self._call is not None and not self._call.takes(character):
                events += self._call.close()
                self._end_call(self._call, events)
            if self._call is None and not self._is_content:
                self._begin(character)
            if self._is_content:
                events.append(Content(self._take_held() + text[position:]))
                break
            if self._call is None:
                self._held += character
                continue
            events += self._call.push(character)
            if self._call.is_complete or self._call.is_no_call:
                self._end_call(self._call, events)
        return events

    def _begin(self, character: str) -> None:
        """Finds out whether a call's object begins with this character, or content."""
        between = self._STRAY if self._num_calls else self._BETWEEN
        start = (self._held + character).strip(between)
        tag, rest = start[: len(self._TAG)], start[len(self._TAG) :].strip(self._BETWEEN)
        if start == "{" or (tag == self._TAG and rest == "{"):
            self._is_marked = self._is_marked or tag == self._TAG
            self._call = JsonCall(self._num_calls, self._names, self._is_marked)
        else:
            self._is_content = bool(rest) or not self._TAG.startswith(tag)

    def _end_call(self, call: JsonCall, events: list[Event]) -> None:
        if call.is_started:
            self._num_calls += 1
            self._held = ""
        else:
            events.append(Content(self._take_held() + call.raw))
            self._is_content = True
        self._call = None

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held.lstrip(self._STRAY) if self._num_calls else held

    def finish(self) -> list[Event]:
        events: list[Event] = []
        text = self._take_held()
        if self._call is not None and self._call.is_started:
            events += self._call.finish()
        elif self._call is not None:
            text += self._call.raw
        self._call = None
        return [*events, Content(text)] if text else events


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

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._call: JsonCall | None = None
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        for character in text:
            if self._call is not None and not self._call.takes(character):
                events += self._call.close()
                self._num_calls, self._call = self._num_calls + self._call.is_started, None
            if self._call is None:
                if character != "{":
                    continue
                self._call = JsonCall(self._num_calls, self._names, is_marked=True)
            events += self._call.push(character)
            if self._call.is_complete:
                self._num_calls, self._call = self._num_calls + self._call.is_started, None
        return events

    def finish(self) -> list[Event]:
        return []
