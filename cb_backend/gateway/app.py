"""The gateway as an ASGI application. Endpoints: chat completions, completions, models, health."""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cb_backend.gateway.answers import Usage
from cb_backend.gateway.bodies import read_body
from cb_backend.gateway.calls import replies
from cb_backend.gateway.errors import ApiError
from cb_backend.gateway.http import ClientGone, EventStream, read_all, until_gone
from cb_backend.gateway.requests import Generation, read_chat, read_completion
from cb_backend.gateway.settings import ENVIRONMENT_VARIABLE, ApiKeys, Settings
from cb_backend.gateway.triton import Reply, Triton

_OPEN_PATHS = ("/health", "/ping")  # those who ask have no key
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_encode = msgspec.json.encode

logger = logging.getLogger("cb_backend.gateway")


def create_app(settings: Settings) -> Starlette:
    """Raises `ConfigError` where the keys' file is wrong."""
    gateway = Gateway(settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await gateway.triton.close()

    routes = [
        Route("/v1/chat/completions", Generate(gateway, is_chat=True), methods=["POST"]),
        Route("/v1/completions", Generate(gateway, is_chat=False), methods=["POST"]),
        Route("/v1/models", gateway.list_models),
        Route("/v1/models/{name:path}", gateway.show_model),
        Route("/health", gateway.health),
        Route("/ping", gateway.health),
    ]
    middleware = [Middleware(Guard, gateway=gateway)]
    if settings.allow_origins:
        cors = Middleware(
            CORSMiddleware, allow_origins=list(settings.allow_origins), allow_methods=["*"], allow_headers=["*"]
        )
        middleware.insert(0, cors)
    handlers: dict[Any, Any] = {404: _no_such_path, 405: _wrong_method, ApiError: _show_error}
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=handlers)


def create_from_environment() -> Starlette:
    """For worker processes, which are given no arguments."""
    return create_app(Settings.from_json(os.environ[ENVIRONMENT_VARIABLE]))


class Gateway:
    """What the endpoints share."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.triton = Triton(settings.url)
        self.keys: ApiKeys | None = settings.api_keys()
        self._started_at = int(time.time())

    async def list_models(self, request: Request) -> Response:
        models = await self.triton.models()
        return _json({"object": "list", "data": [self._shown(name) for name in sorted(models)]})

    async def show_model(self, request: Request) -> Response:
        return _json(self._shown((await self.triton.model(request.path_params["name"])).name))

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if await self.triton.is_ready() else 503)

    def _shown(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started_at, "owned_by": "triton"}


class Generate:
    """An endpoint that generates."""

    def __init__(self, gateway: Gateway, *, is_chat: bool) -> None:
        self._gateway = gateway
        self._is_chat = is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope, "chatcmpl" if self._is_chat else "cmpl")
        try:
            data = await read_all(receive, self._gateway.settings.max_body_bytes)
            await until_gone(receive, self._answer(data, request_id, send, scope))
        except ClientGone:
            pass
        except ApiError as error:
            await _error_response(error, request_id)(scope, receive, send)

    async def _answer(self, data: bytes, request_id: str, send: Send, scope: Scope) -> None:
        body = read_body(data)
        model = await self._gateway.triton.model(body.need("model", str))
        if self._is_chat:
            generation = read_chat(body, model, self._gateway.settings.reading(model.name))
        else:
            generation = read_completion(body, model)
        head = {"id": request_id, "object": generation.object, "created": int(time.time()), "model": model.name}
        if generation.is_stream:
            await self._stream(generation, {**head, "object": generation.chunk_object}, send)
        else:
            whole = await self._collect(generation, head)
            await _json(whole, headers={"x-request-id": request_id})(scope, _nothing, send)

    async def _collect(self, generation: Generation, head: dict[str, Any]) -> dict[str, Any]:
        usage = Usage()
        async for batch in replies(self._gateway.triton, head["model"], generation.inputs, head["id"]):
            for number, reply in batch:
                _push(generation, number, reply, usage)
        return {**head, "choices": [choice.whole() for choice in generation.choices], "usage": usage.shown()}

    async def _stream(self, generation: Generation, head: dict[str, Any], send: Send) -> None:
        """An error before the first token is the response's status; after it, an event."""
        events = EventStream(send, {"x-request-id": head["id"]})
        usage = Usage()
        if generation.wants_usage:
            head["usage"] = None
        begin = [first for choice in generation.choices if (first := choice.begin()) is not None]
        try:
            async for batch in replies(self._gateway.triton, head["model"], generation.inputs, head["id"]):
                chunks, begin = begin, []
                for number, reply in batch:
                    chunks += _push(generation, number, reply, usage)
                if chunks:
                    await events.push([_encode({**head, "choices": [chunk]}) for chunk in chunks])
        except ApiError as error:
            if not events.has_begun:
                raise
            await events.push([_encode(error.body())])
        else:
            if generation.wants_usage:
                await events.push([_encode({**head, "choices": [], "usage": usage.shown()})])
        await events.end()


def _push(generation: Generation, number: int, reply: Reply, usage: Usage) -> list[dict[str, Any]]:
    """Chunks for a reply to request `number`."""
    usage.add(number, reply)
    chunks = []
    for index, text in enumerate(reply.texts):
        choice = generation.choices[number * generation.num_answers + index]
        reason = reply.finish_reasons[index] if index < len(reply.finish_reasons) else ""
        logprobs = reply.logprobs[index] if index < len(reply.logprobs) else ""
        chunks += choice.push(text, reason, logprobs)
    return chunks


class Guard:
    """Asks for a key, and turns whatever fails into an answer of OpenAI's form."""

    def __init__(self, app: Any, gateway: Gateway) -> None:
        self._app = app
        self._keys = gateway.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if self._keys is not None and scope["path"] not in _OPEN_PATHS and not self._keys.are_right(_header(scope)):
            error = ApiError(401, "this gateway needs an API key: 'Authorization: Bearer KEY'", code="invalid_api_key")
            return await _error_response(error)(scope, receive, send)
        has_begun = False

        async def watched(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:  # a defect of ours must not look like the client's mistake
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not has_begun:
                error = ApiError(500, "the gateway could not answer this request; its log says why")
                await _error_response(error)(scope, receive, send)
        return None


def _header(scope: Scope, name: bytes = b"authorization") -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _request_id(scope: Scope, prefix: str) -> str:
    """The client's own, where it is one that a log can hold; else a new one."""
    own = _header(scope, b"x-request-id").decode("latin-1")
    return own if _REQUEST_ID.fullmatch(own) else f"{prefix}-{uuid.uuid4().hex}"


async def _nothing() -> Any:
    return {"type": "http.disconnect"}


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(value), status, headers, media_type="application/json")


def _error_response(error: ApiError, request_id: str | None = None) -> Response:
    own = {} if request_id is None else {"x-request-id": request_id}
    return _json(error.body(), error.status, {**error.headers(), **own})


async def _show_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _no_such_path(request: Request, error: Exception) -> Response:
    return _error_response(ApiError(404, f"there is no {request.url.path} here; try /v1/chat/completions"))


async def _wrong_method(request: Request, error: Exception) -> Response:
    return _error_response(ApiError(405, f"{request.method} is not possible for {request.url.path}"))
