"""Reasoning that a model writes between `<think>` and `</think>` before its answer."""

from __future__ import annotations

from cb_backend.gateway.events import Event, Parser, Reasoning, held_length

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """Splits the reasoning off; what follows it is given to the parser of the answer.

    Reasoning is only looked for at the answer's beginning. `starts_inside`: the chat template has opened it already.
    White space around reasoning is no part of anything.
    """

    def __init__(self, answer: Parser, starts_inside: bool = False) -> None:
        self._answer = answer
        self._buffer = ""
        self._is_inside = starts_inside
        self._is_over = False  # nothing more can be reasoning
        self._is_first = True  # of the reasoning, or of what follows it

    def push(self, text: str) -> list[Event]:
        if self._is_over and not self._is_first:
            return self._answer.push(text)
        self._buffer += text
        events: list[Event] = []
        if not self._is_over and not self._is_inside:
            self._look_for_opening()
        if self._is_inside:
            events += self._reason()
        if self._is_over:
            events += self._begin_answer()
        return events

    def _look_for_opening(self) -> None:
        start = self._buffer.lstrip()
        if start.startswith(OPEN):
            self._is_inside, self._buffer = True, start[len(OPEN) :]
        elif not OPEN.startswith(start):
            self._is_over, self._is_first = True, False

    def _reason(self) -> list[Event]:
        if self._is_first:
            self._buffer = self._buffer.lstrip()
            if self._buffer.startswith(OPEN):  # written again by a model whose template has opened it
                self._buffer = self._buffer[len(OPEN) :].lstrip()
            if not self._buffer or OPEN.startswith(self._buffer):
                return []
            self._is_first = False
        position = self._buffer.find(CLOSE)
        if position >= 0:
            text, self._buffer = self._buffer[:position].rstrip(), self._buffer[position + len(CLOSE) :]
            self._is_inside, self._is_over, self._is_first = False, True, True
        else:
            safe = len(self._buffer) - held_length(self._buffer, (CLOSE,))
            safe = len(self._buffer[:safe].rstrip())
            text, self._buffer = self._buffer[:safe], self._buffer[safe:]
        return [Reasoning(text)] if text else []

    def _begin_answer(self) -> list[Event]:
        if self._is_first:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return []
            self._is_first = False
        text, self._buffer = self._buffer, ""
        return self._answer.push(text)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._is_inside:
            text = self._buffer.strip() if self._is_first else self._buffer.rstrip()
            if text:
                events.append(Reasoning(text))
        elif self._buffer and not self._is_over:
            events += self._answer.push(self._buffer)
        self._buffer = ""
        return events + self._answer.finish()
