"""A case as data: a request, and what must come back, over every way into the server.

    test_stops = over_transports([Case("b2_the_rest_goes", script("a b", "c!d"), {"stop": "bc!"}, text="a ")])

Case names begin with the id of a bug case, so `pytest -k b2_` runs one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.server.cases.transports import TRANSPORTS, Reply, Wire


@dataclass(frozen=True)
class Case:
    """One request. What is None is not looked at; a request must end well unless `error` is set."""

    name: str
    prompt: str | list[int] | None = None  # text_input, or input_ids
    sampling: dict[str, Any] | str | None = field(default_factory=dict)  # greedy unless set; a text is sent as it is
    inputs: dict[str, Any] = field(default_factory=dict)
    model: str = "scripted"
    text: str | None = None
    finish: str | None = None
    num_tokens: int | None = None
    error: str | None = None  # a pattern that the message must hold
    check: Callable[[Reply], None] | None = None

    def ask(self, wire: Wire, transport: str) -> Reply:
        inputs = dict(self.inputs)
        if self.prompt is not None:
            inputs["text_input" if isinstance(self.prompt, str) else "input_ids"] = self.prompt
        is_object = isinstance(self.sampling, dict)
        sampling = {"temperature": 0, **self.sampling} if is_object else self.sampling  # type: ignore[dict-item]
        return wire.ask(transport, self.model, sampling, **inputs)

    def verify(self, reply: Reply) -> None:
        assert reply.num_finals == 1
        if self.error is not None:
            assert reply.error is not None, f"answered: {reply.responses}"
            assert re.search(self.error, reply.error), reply.error
            assert reply.responses == []
            assert_clean(reply.error)
            return
        assert reply.error is None, reply.error
        if self.text is not None:
            assert reply.text() == self.text
        if self.finish is not None:
            assert reply.last("finish_reason") == self.finish
        if self.num_tokens is not None:
            assert reply.num_tokens() == self.num_tokens
        if self.check is not None:
            self.check(reply)


# What no client may see: traces, places in files, names of our own modules.
_LEAK = re.compile(
    r"Traceback|File \"|\.py\b|line \d+, in |cb_backend|/(?:tmp|home|root|usr|opt|work|var|proc)\b|0x[0-9a-f]{6}"
)


def assert_clean(message: str) -> None:
    """An error's text shows nothing of the inside, and is one short line."""
    assert not _LEAK.search(message), message
    assert len(message) < 600
    assert "\n" not in message


def over_transports(cases: Sequence[Case]) -> Callable[..., None]:
    """A test function: each case over each transport."""

    @pytest.mark.server
    @pytest.mark.parametrize("transport", TRANSPORTS)
    @pytest.mark.parametrize("case", cases, ids=lambda case: case.name)
    def test(case: Case, transport: str, wire: Wire) -> None:
        case.verify(case.ask(wire, transport))

    return test
