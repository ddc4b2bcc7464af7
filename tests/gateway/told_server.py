"""A server that answers as it is told, behind a gateway, and what asks the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from cb_backend.gateway import app as app_module
from cb_backend.gateway.errors import bad_request
from cb_backend.gateway.readings import Readings
from cb_backend.gateway.settings import Settings
from cb_backend.gateway.triton import Model, Reply, make_request

MODEL = Model(
    "llm",
    frozenset({"text_input", "messages", "sampling_parameters", "tokenize", "pooling"}),
    frozenset({"text_output", "tokenized"}),
)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def tool(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class Server:
    """Answers each request with the texts it was given, and tells of its template what it was given."""

    def __init__(self, *texts: str, **template: Any) -> None:
        self.texts = texts
        self.template = template
        self.asked: list[Mapping[str, Any]] = []

    async def models(self) -> dict[str, Model]:
        return {"llm": MODEL}

    async def ask(self, model: str, inputs: Mapping[str, Any], request_id: str) -> Reply:
        if "pooling" in inputs:
            raise bad_request("there is nothing to pool")
        return Reply(["a"], tokenized=json.dumps(self.template))

    async def stream(self, model: str, inputs: Mapping[str, Any], request_id: str) -> AsyncIterator[Reply]:
        make_request(model, inputs, request_id)
        self.asked.append(inputs)
        for text in self.texts:
            yield Reply([text], ["None"], [], 3, [1])
        yield Reply(["" for _ in self.texts[:1]], ["stop" for _ in self.texts[:1]], [], 3, [0], is_final=True)

    async def close(self) -> None:
        pass

    @property
    def sampling(self) -> dict[str, Any]:
        return dict(json.loads(self.asked[-1]["sampling_parameters"]))


def ask(server: Server, path: str, body: Any, method: str = "POST", **settings: Any) -> httpx.Response:
    app = app_module.create_app(Settings("nowhere:1", **settings))
    gateway = next(route.endpoint._gateway for route in app.routes if hasattr(route.endpoint, "_gateway"))  # type: ignore[attr-defined]
    gateway.triton = server
    gateway.readings = Readings(gateway.settings, server)  # type: ignore[arg-type]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as client:
            return await client.request(method, path, content=content)

    return asyncio.run(send())


def chat(server: Server, **body: Any) -> dict[str, Any]:
    """The first choice's message."""
    answer = ask(server, CHAT, {"model": "llm", "messages": [{"role": "user", "content": "x"}], **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0]["message"])
