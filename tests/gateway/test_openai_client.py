"""The official `openai` client against the gateway, in front of a real server with tiny weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.conftest import running_gateway
from tests.server.conftest import RunningServer
from tests.waiting import eventually

pytestmark = pytest.mark.server

PROMPT = "the quick brown fox"
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the lazy dog"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


@pytest.fixture
def client(gateway: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0) as made:
        yield made


def own_answer(server: RunningServer, prompt: Any, **sampling: Any) -> tuple[str, tuple[int, int]]:
    """Text and tokens of prompt and answer, by our own client."""
    responses = list(server.client.responses(prompt, is_streaming=False, **sampling))
    text = "".join(response.text for response in responses)
    return text, (responses[0].num_input_tokens, sum(response.num_output_tokens for response in responses))


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["llm"]
    assert client.models.retrieve("llm").owned_by == "triton"
    with pytest.raises(openai.NotFoundError, match="the model 'gpt-5' does not exist here; there is: llm"):
        client.models.retrieve("gpt-5")


@pytest.mark.parametrize("parameters", [
    {"temperature": 0.0, "max_tokens": 24},
    {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 24},
    {"temperature": 0.0, "max_tokens": 24, "frequency_penalty": 1.9, "presence_penalty": 1.9},
    {"temperature": 0.0, "max_tokens": 24, "logit_bias": {"40": -100}},
    {"temperature": 0.0, "max_tokens": 24, "stop": ["a", "e"]},
])  # fmt: skip
def test_a_completion_is_our_own_clients(
    client: openai.OpenAI, gateway_server: RunningServer, parameters: dict[str, Any]
) -> None:
    text, (num_in, num_out) = own_answer(gateway_server, PROMPT, **parameters)
    whole = client.completions.create(model="llm", prompt=PROMPT, **parameters)
    assert whole.choices[0].text == text
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (num_in, num_out)
    chunks = list(
        client.completions.create(
            model="llm", prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **parameters
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (num_in, num_out)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_chat_is_our_own_clients(client: openai.OpenAI, gateway_server: RunningServer) -> None:
    text, (num_in, num_out) = own_answer(gateway_server, MESSAGES, temperature=0, max_tokens=24)
    whole = client.chat.completions.create(model="llm", messages=MESSAGES, temperature=0, max_completion_tokens=24)
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (num_in, num_out)
    stream = client.chat.completions.create(
        model="llm", messages=MESSAGES, temperature=0, max_tokens=24, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_without_a_limit_a_chat_may_take_all_the_room(client: openai.OpenAI) -> None:
    """OpenAI's default for chats is no limit; for completions it is 16 tokens."""
    stop = {"stop_token_ids": [40], "min_tokens": 100}
    long = client.chat.completions.create(model="llm", messages=MESSAGES, temperature=1, seed=1, extra_body=stop)
    assert long.usage is not None
    assert long.usage.completion_tokens > 100
    short = client.completions.create(model="llm", prompt=PROMPT, temperature=0)
    assert short.usage is not None
    assert short.usage.completion_tokens == 16


def test_several_answers_and_prompts_keep_their_places(client: openai.OpenAI, gateway_server: RunningServer) -> None:
    prompts = [PROMPT, "seven wizards", "naïve"]
    texts = [own_answer(gateway_server, prompt, temperature=0, max_tokens=8)[0] for prompt in prompts]
    whole = client.completions.create(model="llm", prompt=prompts, temperature=0, max_tokens=8)
    assert [choice.text for choice in whole.choices] == texts
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    drawn = client.chat.completions.create(model="llm", messages=MESSAGES, n=3, seed=5, max_tokens=8)
    assert len({choice.message.content for choice in drawn.choices}) == 3
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(model="llm", messages=MESSAGES, n=3, seed=5, max_tokens=8, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == [choice.message.content for choice in drawn.choices]


def test_token_ids_and_echo(client: openai.OpenAI) -> None:
    by_ids = client.completions.create(model="llm", prompt=[65, 66, 67], temperature=0, max_tokens=4)
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 3
    echoed = client.completions.create(model="llm", prompt=PROMPT, echo=True, temperature=0, max_tokens=4)
    assert echoed.choices[0].text.startswith(PROMPT)
    with pytest.raises(openai.BadRequestError, match="'echo' repeats a text"):
        client.completions.create(model="llm", prompt=[65, 66, 67], echo=True)


def test_log_probabilities(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="llm", messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 6
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy: the likeliest one
    chunks = client.chat.completions.create(
        model="llm", messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs and choice.logprobs.content
        for entry in choice.logprobs.content
    ]
    assert streamed == content
    older = client.completions.create(model="llm", prompt=PROMPT, temperature=0, max_tokens=6, logprobs=1).choices[0]
    assert older.logprobs is not None
    assert older.logprobs.tokens is not None
    assert older.logprobs.text_offset is not None
    assert len(older.logprobs.tokens) == 6
    assert older.logprobs.text_offset[0] == 0


def test_an_answer_of_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    answer = client.chat.completions.create(model="llm", messages=MESSAGES, max_tokens=60, seed=1, response_format=form)
    assert set(json.loads(answer.choices[0].message.content or "")) == {"city"}


def test_tools_that_must_be_called(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        whole = client.chat.completions.create(
            model="llm",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice=choice,
            max_tokens=120,
            temperature=0,
            parallel_tool_calls=False,
        )
        (call,) = (whole.choices[0].message.tool_calls or [])[:1]
        assert call.type == "function"
        assert call.function.name == "weather"
        assert set(json.loads(call.function.arguments)) == {"city"}
        assert whole.choices[0].finish_reason == "tool_calls"
        assert whole.choices[0].message.content is None
        arguments = ""
        for chunk in client.chat.completions.create(
            model="llm",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice=choice,
            max_tokens=120,
            temperature=0,
            stream=True,
            parallel_tool_calls=False,
        ):
            for one in chunk.choices:
                for part in one.delta.tool_calls or []:
                    assert part.function is not None
                    arguments += part.function.arguments or "" if part.index == 0 else ""
        assert arguments == call.function.arguments


@pytest.mark.parametrize(("body", "text", "param"), [
    ({"max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"temperature": 300}, "temperature", "temperature"),
    ({"max_tokens": "many"}, "'max_tokens' must be a whole number, not a string", "max_tokens"),
    ({"n": 2**40}, "it must be 1 to 64", "n"),
    ({"n": 0}, "'n' is 0; it must be 1 to 64", "n"),
    ({"top_logprobs": 2}, "'top_logprobs' needs 'logprobs': true", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "it must be 0 to 20", "top_logprobs"),
    ({"no_such_thing": 1}, "no_such_thing", "no_such_thing"),
    ({"functions": [{"name": "f"}]}, "send 'tools'", "functions"),
    ({"modalities": ["audio"]}, "answers are text", "modalities"),
    ({"tool_choice": "required"}, "'tool_choice' needs 'tools'", "tool_choice"),
    ({"response_format": {"type": "xml"}}, "it must be text, json_object or json_schema", "response_format"),
    ({"stream_options": {"include_usage": True}}, "needs 'stream': true", "stream_options"),
    ({"messages": []}, "messages", None),
    ({"messages": "hello"}, "'messages' must be a list, not a string", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "message 0 has a part that is not", None),
])  # fmt: skip
def test_a_wrong_request_is_told_what_is_wrong(
    gateway: str, body: dict[str, Any], text: str, param: str | None
) -> None:
    for is_stream in (False, True) if "stream_options" not in body else (False,):
        whole = {"model": "llm", "messages": MESSAGES, "stream": is_stream, **body}
        answer = httpx.post(f"{gateway}/v1/chat/completions", json=whole, timeout=60)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert text in error["message"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param


def test_what_is_no_request_at_all(gateway: str) -> None:
    url = f"{gateway}/v1/chat/completions"
    assert httpx.post(url, content=b"{").json()["error"]["message"].startswith("the body is not JSON")
    assert httpx.post(url, content=b"[]").status_code == 400
    assert httpx.post(url, json={"model": "other", "messages": MESSAGES}).status_code == 404
    assert httpx.post(f"{gateway}/v1/responses", json={}).status_code == 404
    assert httpx.get(url).status_code == 405
    assert httpx.post(url, content=b" " * (5 << 20)).status_code == 413
    assert "error" in httpx.post(f"{gateway}/v1/responses", json={}).json()


def test_a_client_that_leaves_ends_its_request(gateway: str, gateway_server: RunningServer) -> None:
    """Streamed and whole: nobody generates for a client that has gone."""
    gateway_server.kept.cancelled.add("llm")
    before = gateway_server.num_cancelled()
    body = {"model": "llm", "prompt": PROMPT, "max_tokens": 10000, "ignore_eos": True, "temperature": 0}
    with httpx.Client() as http:
        with http.stream("POST", f"{gateway}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
        with pytest.raises(httpx.ReadTimeout):
            http.post(f"{gateway}/v1/completions", json=body, timeout=0.5)
    eventually(lambda: gateway_server.num_cancelled() == before + 2, "both requests are cancelled")
    gateway_server.wait_idle()


def test_keys(gateway_server: RunningServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the tests\nfirst\n\nsecond  # another\n")
    with running_gateway(gateway_server.url, "--api-key-file", str(keys), "--allow-origin", "http://page") as address:
        for key in ("first", "second"):
            with openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as client:
                assert client.models.list().data
        with (
            openai.OpenAI(base_url=f"{address}/v1", api_key="third", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="needs an API key"),
        ):
            client.models.list()
        keys.write_text("third\n")
        with openai.OpenAI(base_url=f"{address}/v1", api_key="third", max_retries=0) as client:
            assert client.models.list().data
        assert httpx.get(f"{address}/health").status_code == 200
        assert httpx.get(f"{address}/v1/models", headers={"authorization": "Bearer first"}).status_code == 401
        headers = {"origin": "http://page", "access-control-request-method": "POST"}
        allowed = httpx.options(f"{address}/v1/chat/completions", headers=headers)
        assert allowed.headers["access-control-allow-origin"] == "http://page"


def test_no_server_is_a_503_that_says_where(gateway: str) -> None:
    with running_gateway("127.0.0.1:9") as address:
        answer = httpx.post(f"{address}/v1/completions", json={"model": "llm", "prompt": "a"}, timeout=60)
        assert answer.status_code == 503
        assert "no Triton server answers at 127.0.0.1:9" in answer.json()["error"]["message"]
        assert httpx.get(f"{address}/health", timeout=60).status_code == 503
    assert "access-control-allow-origin" not in httpx.get(f"{gateway}/health", headers={"origin": "http://a"}).headers
