"""What an answer's text means to OpenAI's clients: content, reasoning, calls of tools. Parsers find it out.

A parser is given the text in pieces of any size and says the same whatever the pieces: that is tested.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple, Protocol


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallStart(NamedTuple):
    """A call of a tool begins. Calls are counted from 0."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """More JSON text of a call's arguments."""

    number: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Of one answer's text."""

    def push(self, text: str) -> list[Event]:
        """What is certain now that `text` has come."""
        ...

    def finish(self) -> list[Event]:
        """The answer is over: what was held back is what it is."""
        ...


class PlainText:
    """Everything is content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def joined(events: Iterable[Event]) -> list[Event]:
    """The events with neighbours of one kind, and of one call, as one."""
    result: list[Event] = []
    for _, group in groupby(events, key=_kind):
        same = list(group)
        if isinstance(same[0], CallStart):
            result += same
        else:  # one join of all texts: an answer may come as a whole, in very many events
            text = "".join(event.text for event in same if not isinstance(event, CallStart))
            result.append(same[0]._replace(text=text))
    return result


def _kind(event: Event) -> tuple[type[Event], int]:
    return type(event), event.number if isinstance(event, CallArguments) else 0


def held_length(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `marks`."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest


def mark_at(text: str, position: int, marks: Iterable[str]) -> str | None:
    """The one of `marks` that stands at `position`; "" where what has come may become one; None: there is none."""
    is_begun = False
    for mark in marks:
        come = text[position : position + len(mark)]
        if come == mark:
            return mark
        is_begun = is_begun or mark.startswith(come)
    return "" if is_begun else None
