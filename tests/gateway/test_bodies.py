"""Bodies that nobody should send: each gets an answer of OpenAI's form, never a defect of the gateway's."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from cb_backend.gateway import app as app_module
from cb_backend.gateway.readings import Readings
from cb_backend.gateway.settings import Settings
from cb_backend.gateway.triton import Model, Reply, make_request

NUM_BODIES = 10_000
INPUTS = ("text_input", "messages", "input_ids", "sampling_parameters", "pooling", "text_pair", "tokenize")
MODEL = Model("llm", frozenset(INPUTS), frozenset({"text_output", "tokenized"}))
PATHS = (
    "/v1/chat/completions", "/v1/chat/completions", "/v1/completions", "/v1/completions", "/v1/embeddings",
    "/v1/rerank", "/tokenize", "/detokenize",
)  # fmt: skip
MESSAGES = [{"role": "user", "content": "x"}]
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "llm", "messages": MESSAGES},
    "/v1/completions": {"model": "llm", "prompt": "x"},
    "/v1/embeddings": {"model": "llm", "input": ["x", "y"]},
    "/v1/rerank": {"model": "llm", "query": "x", "documents": ["x", {"text": "y"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1, 2]},
}
TOLD = {"count": 1, "max_model_len": 9, "tokens": [1], "token_strs": None}
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**40, -(2**70), 1.5, 1e308, "", "a", "auto", "none", "required", "text", [], {},
    [1], ["a"], [None], [[]], [{}], {"a": 1}, {"type": "function"}, {"type": "json_schema"}, [{"role": "user"}],
    [{"role": "user", "content": "x"}], {"type": "function", "function": {"name": "f"}},
    [{"type": "function", "function": {"name": "f"}}], {"include_usage": True}, "\ud800", "\x00", [2**31], [True],
]  # fmt: skip
FIELDS = (
    "model", "messages", "prompt", "stream", "stream_options", "n", "best_of", "echo", "suffix", "logprobs",
    "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "response_format",
    "max_tokens",
    "max_completion_tokens", "modalities", "audio", "prediction", "chat_template_kwargs",
    "continue_final_message", "reasoning_effort", "documents", "user", "structured_outputs", "temperature",
    "stop", "seed", "", "input", "dimensions", "encoding_format", "normalize", "pooling", "query", "documents", "top_n",
    "return_documents", "activation", "tokens", "return_token_strs", "add_special_tokens", "add_generation_prompt",
)  # fmt: skip


class StandIn:
    """A server that answers every request with two replies, and checks that it could be sent."""

    async def models(self) -> dict[str, Model]:
        return {MODEL.name: MODEL}

    async def stream(self, model: str, inputs: Mapping[str, Any], request_id: str) -> AsyncIterator[Reply]:
        sampling = json.loads(inputs["sampling_parameters"])
        make_request(model, inputs, request_id)
        number = sampling.get("n", 1)
        assert isinstance(number, int)
        for is_final in (False, True):
            reason = "stop" if is_final else "None"
            yield Reply(["ab"] * min(number, 64), [reason] * min(number, 64), [], 3, [1], is_final)

    async def ask(self, model: str, inputs: Mapping[str, Any], request_id: str) -> Reply:
        make_request(model, inputs, request_id)
        if "tokenize" in inputs:
            return Reply(["ab"], ["stop"], tokenized=json.dumps(TOLD), is_final=True)
        numbers = struct.pack("f", 0.5) * len(inputs.get("text_pair", "a"))
        return Reply(numbers=numbers, num_input_tokens=3, is_final=True)

    async def close(self) -> None:
        pass


def body(path: str, draw: random.Random) -> dict[str, Any]:
    """Mostly right, so that what is wrong is met deep inside."""
    values: dict[str, Any] = dict(RIGHT[path])
    for name in draw.sample(FIELDS, draw.randint(0, 5)):
        values[name] = draw.choice(JUNK)
    return values


def test_no_body_is_a_defect() -> None:
    app = app_module.create_app(Settings("nowhere:1"))
    draw = random.Random(0)
    statuses: Counter[tuple[str, int]] = Counter()

    async def ask_all() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            for _ in range(NUM_BODIES):
                path = draw.choice(PATHS)
                values = body(path, draw)
                answer = await client.post(path, content=json.dumps(values).encode())
                statuses[path, answer.status_code] += 1
                assert answer.status_code in (200, 400, 404), (values, answer.text)
                if answer.status_code == 400:
                    assert answer.json()["error"]["message"], values
                elif values.get("stream") is True and "completions" in path:
                    assert answer.text.endswith("data: [DONE]\n\n")

    # The gateway's server is the one thing replaced: what is tested is everything before it.
    gateway = next(route.endpoint._gateway for route in app.routes if hasattr(route.endpoint, "_gateway"))  # type: ignore[attr-defined]
    gateway.triton = StandIn()
    gateway.readings = Readings(gateway.settings, gateway.triton)
    asyncio.run(ask_all())
    for path in PATHS:
        assert statuses[path, 200] > NUM_BODIES / 200, statuses
        assert statuses[path, 400] > NUM_BODIES / 200, statuses
