"""Bodies that nobody should send: each gets an answer of OpenAI's form, never a defect of the gateway's."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from cb_backend.gateway import app as app_module
from cb_backend.gateway.settings import Settings
from cb_backend.gateway.triton import Model, Reply

NUM_BODIES = 10_000
MODEL = Model(
    "llm", frozenset({"text_input", "messages", "input_ids", "sampling_parameters"}), frozenset({"text_output"})
)
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
    "stop", "seed", "",
)  # fmt: skip


class StandIn:
    """A server that answers every request with two replies, and checks that it could be sent."""

    async def models(self) -> dict[str, Model]:
        return {MODEL.name: MODEL}

    async def stream(self, model: str, inputs: Mapping[str, Any], request_id: str) -> AsyncIterator[Reply]:
        sampling = json.loads(inputs["sampling_parameters"])
        number = sampling.get("n", 1)
        assert isinstance(number, int)
        for is_final in (False, True):
            reason = "stop" if is_final else "None"
            yield Reply(["ab"] * min(number, 64), [reason] * min(number, 64), [], 3, [1], is_final)

    async def close(self) -> None:
        pass


def body(draw: random.Random) -> dict[str, Any]:
    """Mostly right, so that what is wrong is met deep inside."""
    values: dict[str, Any] = {"model": "llm", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    for name in draw.sample(FIELDS, draw.randint(0, 5)):
        values[name] = draw.choice(JUNK)
    return values


def test_no_body_is_a_defect() -> None:
    app = app_module.create_app(Settings("nowhere:1"))
    draw = random.Random(0)
    statuses: dict[int, int] = {}

    async def ask_all() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            for _ in range(NUM_BODIES):
                values = body(draw)
                path = draw.choice(["/v1/chat/completions", "/v1/completions"])
                answer = await client.post(path, content=json.dumps(values).encode())
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                assert answer.status_code in (200, 400, 404), (values, answer.text)
                if answer.status_code == 400:
                    assert answer.json()["error"]["message"], values
                elif values.get("stream") is True:
                    assert answer.text.endswith("data: [DONE]\n\n")

    # The gateway's server is the one thing replaced: what is tested is everything before it.
    gateway = next(route.endpoint._gateway for route in app.routes if hasattr(route.endpoint, "_gateway"))  # type: ignore[attr-defined]
    gateway.triton = StandIn()
    asyncio.run(ask_all())
    assert statuses[200] > NUM_BODIES / 10
    assert statuses[400] > NUM_BODIES / 10
