"""Chunks of an answer: no more of them than the kinds of what is new."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cb_backend.gateway.answers import ChatChoice
from cb_backend.gateway.events import CallArguments, CallStart, Content, Event, Reasoning, joined
from cb_backend.gateway.parsers import Reading
from cb_backend.gateway.tool_choice import ToolChoice

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ARGUMENTS = json.dumps({"city": "Lyon", "days": list(range(20))})
CALL = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
PIECE = 4  # characters of a token

FORMS = {
    "required": ("none", "required", f"[{CALL}, {CALL}]"),
    "named": ("none", "named", ARGUMENTS),
    "hermes": ("hermes", "auto", f"So: <tool_call>{CALL}</tool_call>"),
    "llama3": ("llama3", "auto", f"{CALL}; {CALL}"),
    "mistral, a list": ("mistral", "auto", f"[TOOL_CALLS][{CALL}, {CALL}]"),
    "mistral, newer": ("mistral", "auto", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
}


def choice_of(title: str) -> ChatChoice:
    tools, mode, _ = FORMS[title]
    return ChatChoice(0, Reading(tools, "none").parser(ToolChoice(mode, (TOOL,), "weather")), None)


@pytest.mark.parametrize("title", FORMS)
def test_a_token_of_arguments_is_one_chunk(title: str) -> None:
    text = FORMS[title][2]
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    choice = choice_of(title)
    chunks = [choice.push(piece, "None", "null") for piece in pieces]
    num_calls = len(choice.whole()["message"]["tool_calls"])
    assert max(map(len, chunks)) <= 2, "of a call's name and of its first arguments"
    assert sum(map(len, chunks)) <= len(pieces) + num_calls


@pytest.mark.parametrize("title", FORMS)
def test_a_whole_answer_is_a_chunk_a_kind(title: str) -> None:
    choice = choice_of(title)
    chunks = choice.push(FORMS[title][2], "stop", "null")
    calls = choice.whole()["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [ARGUMENTS] * len(calls)
    has_content = title == "hermes"
    assert len(chunks) == 2 * len(calls) + has_content + 1
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_events_of_one_kind_and_call_are_joined() -> None:
    events: list[Event] = [
        Content("a"), Content("b"), Reasoning("c"), Reasoning("d"), Content("e"), CallStart(0, "f"), CallStart(1, "f"),
        CallArguments(0, "g"), CallArguments(0, "h"), CallArguments(1, "i"), CallArguments(1, "j"),
    ]  # fmt: skip
    assert joined(events) == [
        Content("ab"), Reasoning("cd"), Content("e"), CallStart(0, "f"), CallStart(1, "f"),
        CallArguments(0, "gh"), CallArguments(1, "ij"),
    ]  # fmt: skip
    assert joined([]) == []
