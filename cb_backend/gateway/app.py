"""The gateway as an ASGI application: its endpoints, what they share, and who may ask."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cb_backend.gateway.adapters import AdapterNames, Chosen
from cb_backend.gateway.answers import Usage
from cb_backend.gateway.bodies import Body, read_body
from cb_backend.gateway.calls import replies
from cb_backend.gateway.error_log import ErrorLog, error_line
from cb_backend.gateway.errors import ApiError
from cb_backend.gateway.http import ClientGone, EventStream, read_all, until_gone
from cb_backend.gateway.page import show_page
from cb_backend.gateway.readings import Readings
from cb_backend.gateway.requests import Generation, read_chat, read_completion
from cb_backend.gateway.responses import (
    Answering,
    JsonEndpoint,
    encode,
    error_response,
    header,
    json_response,
    request_id_of,
)
from cb_backend.gateway.settings import ENVIRONMENT_VARIABLE, ApiKeys, Settings
from cb_backend.gateway.tokens import Tokens
from cb_backend.gateway.triton import Reply, Triton
from cb_backend.gateway.vectors import Vectors

_HEALTH_PATHS = ("/health", "/health/ready", "/ping")  # vLLM's, Triton's own frontend's, SageMaker's
# Those who ask have no key: probes, and a browser before its page has asked for one.
_OPEN_PATHS = (*_HEALTH_PATHS, "/")
_EXPOSED = ("x-request-id", "retry-after", "x-should-retry")  # headers that a page's own scripts may read
_RERANK_PATHS = ("/v1/rerank", "/rerank")  # clients of Jina's and of vLLM's

logger = logging.getLogger("cb_backend.gateway")


def create_app(settings: Settings) -> Starlette:
    """Raises `ConfigError` where the keys' file is wrong."""
    gateway = Gateway(settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await gateway.triton.close()

    vectors, tokens = Vectors(gateway.choose), Tokens(gateway.choose)
    routes = [
        Route("/v1/chat/completions", Generate(gateway, is_chat=True), methods=["POST"]),
        Route("/v1/completions", Generate(gateway, is_chat=False), methods=["POST"]),
        Route("/v1/models", gateway.list_models),
        Route("/v1/models/{name:path}", gateway.show_model),
        Route("/v1/embeddings", gateway.endpoint(vectors.embeddings, "embd"), methods=["POST"]),
        *(Route(path, gateway.endpoint(vectors.rerank, "rerank"), methods=["POST"]) for path in _RERANK_PATHS),
        Route("/tokenize", gateway.endpoint(tokens.tokenize, "tok"), methods=["POST"]),
        Route("/detokenize", gateway.endpoint(tokens.detokenize, "detok"), methods=["POST"]),
        Route("/", show_page),
        *(Route(path, gateway.health) for path in _HEALTH_PATHS),
    ]
    middleware = [Middleware(Guard, gateway=gateway)]
    if settings.allow_origins:
        cors = Middleware(
            CORSMiddleware, allow_origins=list(settings.allow_origins), allow_methods=["*"], allow_headers=["*"],
            expose_headers=_EXPOSED,
        )  # fmt: skip
        middleware.insert(0, cors)
    middleware.insert(0, Middleware(ErrorLog, left_out=_HEALTH_PATHS))  # who probes sees it himself, and asks often
    handlers: dict[Any, Any] = {404: _no_such_path, 405: _wrong_method, ApiError: _show_error}
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=handlers)


def create_from_environment() -> Starlette:
    """For worker processes, which are given no arguments. Their log is this gateway's alone: its lines say when."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    return create_app(Settings.from_json(os.environ[ENVIRONMENT_VARIABLE]))


class Gateway:
    """What the endpoints share."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.triton = Triton(settings.url)
        self.readings = Readings(settings, self.triton)
        self.keys: ApiKeys | None = settings.api_keys()
        self._adapters = AdapterNames(settings.lora_separator, settings.model_repository)
        self._started_at = int(time.time())

    def endpoint(self, answering: Answering, prefix: str) -> JsonEndpoint:
        """`prefix`: of the ids of requests that have none."""
        return JsonEndpoint(answering, lambda: self.triton, self.settings.max_body_bytes, prefix)

    async def list_models(self, request: Request) -> Response:
        names = self._adapters.names(await self.triton.models())
        return json_response({"object": "list", "data": [self._shown(name) for name in names]})

    async def show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self.choose(name)
        return json_response(self._shown(name))

    async def choose(self, name: str) -> Chosen:
        """Raises `ApiError` 404."""
        return self._adapters.choose(name, await self.triton.models())

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
        request_id = request_id_of(scope, "chatcmpl" if self._is_chat else "cmpl")
        try:
            data = await read_all(receive, self._gateway.settings.max_body_bytes)
            await until_gone(receive, self._answer(data, request_id, send, scope))
        except ClientGone:
            pass
        except ApiError as error:
            await error_response(error, request_id)(scope, receive, send)

    async def _answer(self, data: bytes, request_id: str, send: Send, scope: Scope) -> None:
        body = read_body(data)
        names = frozenset(body.left)
        try:
            await self._generate(body, request_id, send, scope)
        except ApiError as error:
            error.find_param(names)
            raise

    async def _generate(self, body: Body, request_id: str, send: Send, scope: Scope) -> None:
        name = body.need("model", str)
        model, adapter = await self._gateway.choose(name)
        if adapter:
            body.refuse("lora_name", f"the model {name!r} names one", (adapter,))
            body.left["lora_name"] = adapter
        if self._is_chat:
            generation = read_chat(body, model, await self._gateway.readings.of(model, body))
        else:
            generation = read_completion(body, model)
        head = {"id": request_id, "object": generation.object, "created": int(time.time()), "model": name}
        if generation.is_stream:
            await self._stream(model.name, generation, {**head, "object": generation.chunk_object}, send)
        else:
            whole = await self._collect(model.name, generation, head)
            await json_response(whole, headers={"x-request-id": request_id})(scope, _nothing, send)

    async def _collect(self, model: str, generation: Generation, head: dict[str, Any]) -> dict[str, Any]:
        usage = Usage()
        prompt_logprobs: dict[int, str] = {}
        async for batch in replies(self._gateway.triton, model, generation.inputs, head["id"]):
            for number, reply in batch:
                _push(generation, number, reply, usage)
                if reply.prompt_logprobs:
                    prompt_logprobs[number] = reply.prompt_logprobs
        return {**head, **generation.whole(prompt_logprobs), "usage": usage.shown()}

    async def _stream(self, model: str, generation: Generation, head: dict[str, Any], send: Send) -> None:
        """An error before the first token is the response's status; after it, an event."""
        events = EventStream(send, {"x-request-id": head["id"]})
        usage = Usage()
        if generation.wants_usage:
            head["usage"] = None
        before = encode(head)[:-1] + b',"choices":['  # of every chunk: only its choice differs
        begin = [first for choice in generation.choices if (first := choice.begin()) is not None]
        try:
            async for batch in replies(self._gateway.triton, model, generation.inputs, head["id"]):
                chunks, begin = begin, []
                for number, reply in batch:
                    chunks += _push(generation, number, reply, usage)
                if chunks:
                    await events.push([before + encode(chunk) + b"]}" for chunk in chunks])
        except ApiError as error:
            if not events.has_begun:
                raise
            logger.warning("%s", error_line("stream", "of " + model, 200, head["id"], error.message))
            await events.push([encode(error.body())])
        else:
            if generation.wants_usage:
                await events.push([encode({**head, "choices": [], "usage": usage.shown()})])
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
        if self._keys is not None and scope["path"] not in _OPEN_PATHS and not self._keys.are_right(header(scope)):
            error = ApiError(401, "this gateway needs an API key: 'Authorization: Bearer KEY'", code="invalid_api_key")
            return await error_response(error)(scope, receive, send)
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
                await error_response(error)(scope, receive, send)
        return None


async def _nothing() -> Any:
    return {"type": "http.disconnect"}


async def _show_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _no_such_path(request: Request, error: Exception) -> Response:
    return error_response(ApiError(404, f"there is no {request.url.path} here; try /v1/chat/completions"))


async def _wrong_method(request: Request, error: Exception) -> Response:
    response = error_response(ApiError(405, f"{request.method} is not possible for {request.url.path}"))
    response.headers.update(getattr(error, "headers", None) or {})  # which methods are
    return response
