"""gpt-oss' markup: an answer is messages of channels. Source: OpenAI's harmony response format."""

from __future__ import annotations

import re

from cb_backend.gateway.events import CallArguments, CallStart, Content, Event, Reasoning, held_length


class HarmonyParser:
    """`analysis` is reasoning, what is addressed to a function is its call, the rest is content.

    The control tokens must be in the text (`skip_special_tokens` false).
    """

    _MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
    _ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
    _RECIPIENT = "to=functions."
    _ADDRESS = re.compile(r"to=[^\s<]*\s*")

    def __init__(self) -> None:
        self._buffer = ""
        self._header = ""
        self._is_in_header = True
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        while True:
            if self._is_in_header:
                if not self._read_header():
                    return events
                self._is_in_header = False
                if (name := self._function()) is not None:
                    self._num_calls += 1
                    events.append(CallStart(self._num_calls - 1, name))
            elif self._read_body(events):
                self._is_in_header, self._header = True, ""
            else:
                return events

    def _read_header(self) -> bool:
        """Whether the header has come as a whole."""
        if not self._could_be_header():
            # No markup at all: a model that does not write it, or a server that leaves the control tokens out.
            self._header = "<|channel|>final"
            return True
        position = self._buffer.find("<|message|>")
        if position < 0:
            return False
        self._header = self._buffer[:position]
        self._buffer = self._buffer[position + len("<|message|>") :]
        return True

    def _could_be_header(self) -> bool:
        start = self._buffer.lstrip()
        if addressed := self._ADDRESS.match(start):
            # The prompt ends with `<|start|>assistant`, so that a header may go on with whom it is addressed to.
            start = start[addressed.end() :]
        elif "to=".startswith(start):
            return True
        return any(mark.startswith(start) or start.startswith(mark) for mark in self._MARKS)

    def _function(self) -> str | None:
        _, _, rest = self._header.partition(self._RECIPIENT)
        words = rest.split("<|")[0].split()
        return words[0] if words else None

    def _read_body(self, events: list[Event]) -> bool:
        """Says what has come of the message's text. Whether it is over."""
        ends = [(position, mark) for mark in self._ENDS if (position := self._buffer.find(mark)) >= 0]
        if ends:
            position, mark = min(ends)
            text, self._buffer = self._buffer[:position], self._buffer[position + len(mark) :]
            if mark == "<|start|>":
                self._buffer = mark + self._buffer
        else:
            safe = len(self._buffer) - held_length(self._buffer, self._ENDS)
            text, self._buffer = self._buffer[:safe], self._buffer[safe:]
        if text:
            events.append(self._event(text))
        return bool(ends)

    def _event(self, text: str) -> Event:
        if self._function() is not None:
            return CallArguments(self._num_calls - 1, text)
        return Reasoning(text) if "analysis" in self._header else Content(text)

    def finish(self) -> list[Event]:
        text, self._buffer = self._buffer, ""
        if not text:
            return []
        if not self._is_in_header:
            return [self._event(text)]
        return [] if text.lstrip().startswith("<|") else [Content(text)]
