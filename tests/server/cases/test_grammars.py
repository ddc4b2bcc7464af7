"""Kind W on the wire: what no grammar can be made of is refused before the queue. (The rest is in tests/engine.)"""

from __future__ import annotations

import json

import pytest

from tests.server.cases.case import Case, over_transports
from tests.server.cases.transports import TRANSPORTS, Wire

DEEP: dict[str, object] = {"type": "string"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}

BAD = {
    "bracket": {"guided_regex": "[a"},
    "parenthesis": {"guided_regex": "(a"},
    "backreference": {"guided_regex": r"(a)\1"},
    "schema_type": {"guided_json": {"type": 12}},
    "schema_no_object": {"guided_json": [1]},
    "schema_reference": {"guided_json": {"$ref": "#/nowhere"}},
    "schema_deep": {"guided_json": DEEP},
    "grammar": {"guided_grammar": "root ::= ("},
    "choice": {"guided_choice": [1, 2]},
    "two_at_once": {"guided_regex": "a", "guided_choice": ["b"]},
}
test_refusals = over_transports(
    [Case(f"w1_{name}", "the", sampling, model="llm", error=".") for name, sampling in BAD.items()]
)


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_w4_an_answer_within_a_grammar(wire: Wire, transport: str) -> None:
    choices = ["the quick", "a fox"]
    sampling = {"guided_choice": choices, "temperature": 1.0, "seed": 3, "max_tokens": 32}
    reply = wire.ask(transport, "llm", sampling, text_input="the")
    assert reply.error is None
    assert reply.text() in choices
    assert reply.last("finish_reason") == "stop"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    reply = wire.ask(transport, "llm", {"guided_json": schema, "temperature": 0, "max_tokens": 64}, text_input="the")
    assert json.loads(reply.text())["a"] in (1, 2)
