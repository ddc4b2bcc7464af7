"""Calls of tools and reasoning, read out of an answer's text in pieces of any size."""

from __future__ import annotations

import json
import random

import pytest

from cb_backend.gateway.events import CallArguments, CallStart, Content, Event, Parser, joined
from cb_backend.gateway.parsers import Reading
from tests.gateway.parser_cases import AUTO, CALL, CASES, PERSON, SHORT, UNKNOWN

NUM_SPLITS = 2000  # of the answers of one parser


def make(title: str) -> Parser:
    tools, reasoning, choice, _, _ = CASES[title]
    return Reading(tools, reasoning).parser(choice)


def meaning(title: str) -> list[Event]:
    text, expected = CASES[title][3:]
    return [Content(text)] if isinstance(expected, str) else expected


def read(parser: Parser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


@pytest.mark.parametrize("title", CASES)
def test_an_answer_means_what_it_says(title: str) -> None:
    text, expected = CASES[title][3], meaning(title)
    assert read(make(title), [text]) == expected


@pytest.mark.parametrize("title", CASES)
def test_pieces_mean_what_the_whole_means(title: str) -> None:
    text, expected = CASES[title][3], meaning(title)
    draw = random.Random(title)
    assert read(make(title), list(text)) == expected
    for _ in range(NUM_SPLITS // sum(other.startswith(title.split(",")[0]) for other in CASES)):
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 8)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(make(title), pieces) == expected, pieces


@pytest.mark.parametrize("title", [title for title in CASES if not title.startswith(("plain", "reasoning"))])
def test_an_answer_cut_anywhere_raises_nothing_and_says_nothing_twice(title: str) -> None:
    text = CASES[title][3]
    for end in range(len(text)):
        events = read(make(title), [text[:end]])
        names = [event.name for event in events if isinstance(event, CallStart)]
        assert len(names) <= 2
        for event in events:
            if isinstance(event, CallArguments):
                assert event.text in text.replace("\\", "") or event.text in text


def test_arguments_are_the_models_own_json() -> None:
    events = read(make("hermes"), [CASES["hermes"][3]])
    arguments = next(event for event in events if isinstance(event, CallArguments))
    assert json.loads(arguments.text)["note"] == "größer"


FRAGMENTS = (
    *'{}[],:" \n;<1', '"name"', '"arguments"', '"weather"', "clock", "and so on", "null", CALL, SHORT, UNKNOWN, PERSON,
    "<tool_call>", "</tool_call>", "</tool", "<|python_tag|>", "<|py", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[TOOL",
)  # fmt: skip


@pytest.mark.parametrize("tools", ["auto", "hermes", "llama3", "mistral"])
def test_any_text_means_the_same_in_pieces_and_nothing_of_it_is_lost(tools: str) -> None:
    draw, reading = random.Random(tools), Reading(tools, "none")
    for _ in range(1000):
        text = "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 14)))
        whole = read(reading.parser(AUTO), [text])
        assert read(reading.parser(AUTO), list(text)) == whole, text
        cut = draw.randrange(len(text) + 1)
        assert read(reading.parser(AUTO), [text[:cut], text[cut:]]) == whole, text
        if not any(isinstance(event, CallStart) for event in whole):
            told = "".join(event.text for event in whole if isinstance(event, Content))
            if tools == "mistral":  # its mark is no content, nor are spaces between it and the first word
                text, told = (each.replace("[TOOL_CALLS]", "").lstrip() for each in (text, told))
            assert told == text
