"""Which parser reads an answer: by the model's settings, and by what the request asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cb_backend.gateway.events import CallArguments, CallStart, Event, Parser, PlainText
from cb_backend.gateway.harmony import HarmonyParser
from cb_backend.gateway.mistral import MistralParser
from cb_backend.gateway.reasoning import ThinkParser
from cb_backend.gateway.tool_choice import ToolChoice
from cb_backend.gateway.tools import HermesParser, JsonParser, NamedCall, RequiredCalls

TOOL_PARSERS: dict[str, Callable[[frozenset[str]], Parser]] = {  # given the names of the functions offered
    "hermes": HermesParser,
    "llama3": JsonParser,
    "mistral": MistralParser,
}
TOOL_NAMES = ("auto", *TOOL_PARSERS, "gpt-oss", "none")
REASONING_NAMES = ("auto", "think", "think-open", "gpt-oss", "none")
_THINK_END = "think>"  # of the mark, whose slash a pattern may escape
_NEED_CONTROL_TOKENS = ("mistral", "gpt-oss")


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of one model are read. See `TOOL_NAMES` and `REASONING_NAMES`."""

    tools: str = "auto"
    reasoning: str = "auto"  # where nobody knows better: "think"

    def needs_control_tokens(self, choice: ToolChoice) -> bool:
        """Whether the model must leave its control tokens in the text."""
        return self.reasoning == "gpt-oss" or (choice.mode == "auto" and self.tools in _NEED_CONTROL_TOKENS)

    def of_form(self, patterns: str) -> Reading:
        """For answers that are held to a form: nothing of them is reasoning that the template has opened, unless
        `patterns` of the form close it."""
        return self if self.reasoning != "think-open" or _THINK_END in patterns else replace(self, reasoning="think")

    def parser(self, choice: ToolChoice) -> Parser:
        """For one answer."""
        if choice.mode == "named":
            return NamedCall(choice.name)
        if choice.mode == "required":
            return RequiredCalls(choice.names)
        parser = self._free_parser(choice)
        return parser if choice.is_parallel else FirstCall(parser)

    def _free_parser(self, choice: ToolChoice) -> Parser:
        """Of an answer that the model chooses."""
        if self.reasoning == "gpt-oss" or (choice.mode == "auto" and self.tools == "gpt-oss"):
            return HarmonyParser()
        answer = self._tool_parser(choice.names) if choice.mode == "auto" else PlainText()
        return answer if self.reasoning == "none" else ThinkParser(answer, self.reasoning == "think-open")

    def _tool_parser(self, names: frozenset[str]) -> Parser:
        if self.tools == "none":
            return PlainText()
        return AutoParser(names) if self.tools == "auto" else TOOL_PARSERS[self.tools](names)


class FirstCall:
    """What another parser says, but for every call after the first: the request wants one at a time."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Event]:
        return self._kept(self._parser.push(text))

    def finish(self) -> list[Event]:
        return self._kept(self._parser.finish())

    def _kept(self, events: list[Event]) -> list[Event]:
        return [event for event in events if not (isinstance(event, CallStart | CallArguments) and event.number)]


class AutoParser:
    """Chooses by the answer's first characters: an object is Llama's form, anything else may hold Hermes' marks."""

    _TAG = "<|python_tag|>"

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._buffer = ""
        self._chosen: Parser | None = None

    def push(self, text: str) -> list[Event]:
        if self._chosen is None:
            self._buffer += text
            start = self._buffer.lstrip()
            if self._TAG.startswith(start):  # nothing yet, or a part of the mark
                return []
            form = JsonParser if start.startswith(("{", self._TAG)) else HermesParser
            self._chosen = form(self._names)
            text, self._buffer = self._buffer, ""
        return self._chosen.push(text)

    def finish(self) -> list[Event]:
        if self._chosen is None:
            self._chosen = HermesParser(self._names)
            return [*self._chosen.push(self._buffer), *self._chosen.finish()]
        return self._chosen.finish()
