"""What OpenAI's clients and those that speak like them send and expect, in front of a server that answers as told."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import pytest
from llguidance import LLMatcher
from tritonclient.grpc import service_pb2

from cb_backend.cli import openai
from cb_backend.cli.server.server_process import free_ports
from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request import check_prompt_length
from cb_backend.gateway.errors import ApiError, from_stream
from cb_backend.gateway.settings import ENVIRONMENT_VARIABLE
from cb_backend.gateway.triton import Triton
from tests.gateway.told_server import CHAT, COMPLETION, Server, ask, chat, tool

CALLS = (
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'
)
# ---- tools -----------------------------------------------------------------------------------------------------------

NESTED = {
    "type": "object",
    "properties": {
        "a": {"$ref": "#/$defs/A"},
        "$ref": {"type": "string"},  # a property's name
        "b": {"const": {"$ref": "#/x"}},
        "more": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["a"],
    "$defs": {"A": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}}}},
}


@pytest.mark.parametrize("num_tools", [1, 2])
def test_schemas_of_tools_that_must_be_called_may_refer_to_themselves(num_tools: int) -> None:
    """As pydantic and zod write nested types: references are of a tool's own schema, wherever that is put."""
    other = {
        "type": "object",
        "properties": {"c": {"$ref": "#/definitions/A"}},
        "definitions": {"A": {"type": "string"}},
    }
    server = Server("[")
    chat(server, tools=[tool(NESTED), tool(other, "g")][:num_tools], tool_choice="required")
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(server.sampling["structured_outputs"]["json"]))
    assert LLMatcher.validate_grammar(grammar) == ""
    asked = json.dumps(server.sampling)
    assert asked.count('{"const": {"$ref": "#/x"}}') == 1, "values are no schemas"
    assert '"$ref": {"type": "string"}' in asked
    assert json.loads(server.asked[0]["messages"])["tools"][0] == tool(NESTED), "the template gets it as it was sent"


def test_without_parallel_calls_there_is_one_call() -> None:
    server = Server(CALLS, " More.")
    calls = chat(server, tools=[tool({})])["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"a": 1}', "{}"]
    message = chat(server, tools=[tool({})], parallel_tool_calls=False)
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a": 1}']
    assert message["content"] == "More."


GPT_OSS = "<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>"


@pytest.mark.parametrize(("text", "form"), [
    ('<tool_call>{"name": "f"}</tool_call>', "hermes"), ('<tool_call>{"name": "f", "arguments": ""}', "hermes"),
    ('<tool_call>{"arguments": null, "name": "f"}', "hermes"), (GPT_OSS, "gpt-oss"),
])  # fmt: skip
def test_a_call_without_arguments_has_an_empty_object(text: str, form: str) -> None:
    """Clients parse them as JSON."""
    server = Server(text, tool_calls=form, reasoning="none" if form == "hermes" else form)
    (call,) = chat(server, tools=[tool({})])["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}
    body = {"model": "llm", "messages": [{"role": "user", "content": "x"}], "tools": [tool({})], "stream": True}
    events = [json.loads(line[6:]) for line in ask(server, CHAT, body).text.split("\n\n") if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    told = [call["function"].get("arguments", "") for delta in deltas for call in delta.get("tool_calls", ())]
    assert ("".join(told), events[-1]["choices"][0]["finish_reason"]) == ("{}", "tool_calls")


# ---- answers in a form -----------------------------------------------------------------------------------------------

OBJECT = '{"name": "Ann", "parameters": {"age": 3}}'
FORM = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": {"type": "object"}}}


@pytest.mark.parametrize("asked", [
    {"response_format": FORM}, {"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": ".*"}},
    {"guided_json": {"type": "object"}}, {"guided_choice": [OBJECT]},
])  # fmt: skip
@pytest.mark.parametrize("tools", ["llama3", "hermes"])
def test_an_answer_in_a_form_is_content(asked: dict[str, Any], tools: str) -> None:
    """The form holds from the first token on: nothing of it is reasoning that the template has opened, or a call."""
    server = Server(OBJECT, tool_calls=tools, reasoning="think", is_reasoning_open=True)
    for offered in ({}, {"tools": [tool({})]}):
        message = chat(server, **asked, **offered)
        assert message["content"] == OBJECT
        assert "reasoning_content" not in message
        assert "tool_calls" not in message


def test_a_form_that_holds_reasoning_itself_is_read_as_such() -> None:
    server = Server("So.</think>", "Yes", reasoning="think", is_reasoning_open=True)
    message = chat(server, structured_outputs={"regex": ".*</think>(Yes|No)"})
    assert (message["reasoning_content"], message["content"]) == ("So.", "Yes")
    message = chat(server, guided_grammar='start: /.*/ "</think>" /Yes|No/')
    assert (message["reasoning_content"], message["content"]) == ("So.", "Yes")
    schema = {"type": "object", "description": "What stands between <think> and </think> elsewhere."}
    assert chat(server, structured_outputs={"json": schema})["content"] == "So.</think>Yes"
    message = chat(server, response_format={"type": "text"}, guided_json=None)
    assert message["reasoning_content"] == "So."


# ---- bodies ----------------------------------------------------------------------------------------------------------


def test_letters_go_on_as_they_are() -> None:
    """Written as escapes they would take up to three times the bytes, of which messages may have so many."""
    text = "größer 中文 😀 \U000f0123"
    server = Server("a")
    chat(server, messages=[{"role": "user", "content": text}], stop=[text])
    assert text in server.asked[0]["messages"]
    assert text in server.asked[0]["sampling_parameters"]


def test_what_is_nested_too_deeply_is_the_clients_mistake() -> None:
    head = b'{"model": "llm", "messages": [{"role": "user", "content": "x"}], '
    for depth in range(940, 1000):
        deep = b"[" * depth + b"]" * depth
        for field in (
            b'"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": %s}}}}' % deep,
            b'"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": '
            b'{"a": %s}}}]}' % deep,
        ):
            answer = ask(Server("a"), CHAT, head + field)
            assert answer.status_code in (200, 400), (depth, answer.text)
        body = b'{"model": "llm", "input": "x", "pooling": {"a": %s}, "b": %s}' % (deep, deep)
        assert ask(Server(), "/v1/embeddings", body).status_code == 400, depth
    assert "nested too deeply" in answer.json()["error"]["message"]


def test_options_of_a_stream_have_types() -> None:
    body = {"model": "llm", "prompt": "x", "stream": True, "stream_options": {"include_usage": "no"}}
    answer = ask(Server("a"), COMPLETION, body)
    assert (answer.status_code, "'include_usage' must be true or false" in answer.text) == (400, True)


@pytest.mark.parametrize("options", [{"foo": 1}, {"continuous_usage_stats": True}, {"include_usage": True, "x": []}])
def test_options_of_a_stream_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    answer = ask(Server("a"), COMPLETION, {"model": "llm", "prompt": "x", "stream": True, "stream_options": options})
    name = next(name for name in options if name != "include_usage")
    assert answer.status_code == 400
    assert f"'stream_options.{name}' is not supported" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize("options", [
    {"include_obfuscation": True}, {"include_obfuscation": False}, {"continuous_usage_stats": False}, {"foo": None}, {},
])  # fmt: skip
def test_options_of_a_stream_that_ask_for_nothing_are_taken(options: dict[str, Any]) -> None:
    """Of OpenAI's own, padding against who listens to a line changes no answer."""
    answer = ask(Server("a"), COMPLETION, {"model": "llm", "prompt": "x", "stream": True, "stream_options": options})
    assert answer.status_code == 200, answer.text


def test_fields_about_openais_own_service_have_no_effect() -> None:
    server = Server("a")
    chat(server, user="u", prompt_cache_key="k", prompt_cache_retention="24h", prompt_cache_options={"mode": "x"})
    assert server.sampling.keys() == {"max_tokens"}


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_stream_without_anything_to_say_is_a_stream(path: str) -> None:
    body = {"model": "llm", "prompt": "x"} if path == COMPLETION else {"model": "llm", "messages": [{"role": "user"}]}
    answer = ask(Server(), path, {**body, "stream": True})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert answer.text.endswith("data: [DONE]\n\n")


def test_what_http_asks_of_an_error(tmp_path: Any) -> None:
    answer = ask(Server(), CHAT, b"", method="GET")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    keys = tmp_path / "keys"
    keys.write_text("one")
    answer = ask(Server(), CHAT, b"", api_key_file=str(keys))
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("has_output", [True, False])
def test_a_prompt_that_is_too_long_has_openais_code(has_output: bool) -> None:
    """By which clients know that they must shorten the conversation."""
    with pytest.raises(InvalidRequestError, match="max_model_len") as raised:
        check_prompt_length(100, 50, has_output=has_output)
    error = from_stream(str(raised.value))
    assert (error.status, error.code) == (400, "context_length_exceeded")
    vllm = "This model's maximum context length is 50 tokens. However, your request has 100 input tokens."
    assert from_stream(vllm).code == "context_length_exceeded"
    assert from_stream("max_tokens must be at least 1").code is None
    assert isinstance(error, ApiError)


# ---- connections and lists -------------------------------------------------------------------------------------------


def test_a_connection_without_requests_outlives_its_clients_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the one closes it at the moment at which the other sends a request over it."""
    given: dict[str, Any] = {}
    monkeypatch.setattr("uvicorn.run", lambda *_, **options: given.update(options))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    parser = argparse.ArgumentParser()
    openai.add_arguments(parser)
    assert openai.run(parser.parse_args(["--port", str(free_ports(1)[0])])) == 0
    assert given["timeout_keep_alive"] > 90


class Listing(Triton):
    """Counts how often it is asked for the list; the first time, it is not there."""

    def __init__(self) -> None:
        super().__init__("nowhere:1")
        self.num_asked = 0

    async def _call(self, name: str, request: Any) -> Any:
        await asyncio.sleep(0)
        if name == "RepositoryIndex":
            self.num_asked += 1
            if self.num_asked == 1:
                raise ApiError(503, "no server")
            return service_pb2.RepositoryIndexResponse(models=[{"name": "llm"}])
        tensors = {"inputs": [{"name": "sampling_parameters"}], "outputs": [{"name": "text_output"}]}
        return service_pb2.ModelMetadataResponse(name="llm", **tensors)


def test_the_list_of_models_is_read_once_for_all_who_want_it_at_a_time() -> None:
    async def want() -> None:
        triton = Listing()
        failed = await asyncio.gather(*(triton.models() for _ in range(5)), return_exceptions=True)
        assert [getattr(each, "status", 0) for each in failed] == [503] * 5
        asking = [asyncio.create_task(triton.models()) for _ in range(5)]
        await asyncio.sleep(0)
        asking[0].cancel()  # its client has gone; the others have not
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert [list(each) for each in found[1:]] == [["llm"]] * 4  # type: ignore[arg-type]
        assert triton.num_asked == 2

    asyncio.run(want())
