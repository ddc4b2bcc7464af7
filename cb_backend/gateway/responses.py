"""Responses that are no streams: JSON, errors of OpenAI's form, and endpoints that give one JSON value for a body."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cb_backend.gateway.bodies import Body, read_body
from cb_backend.gateway.errors import ApiError
from cb_backend.gateway.http import ClientGone, read_all, until_gone
from cb_backend.gateway.triton import Triton

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
encode = msgspec.json.encode

# A body, the server behind, the request's id -> what is answered. Raises `ApiError`.
Answering = Callable[[Body, Triton, str], Awaitable[dict[str, Any]]]


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, media_type="application/json")


def error_response(error: ApiError, request_id: str | None = None) -> Response:
    own = {} if request_id is None else {"x-request-id": request_id}
    return json_response(error.body(), error.status, {**error.headers(), **own})


def header(scope: Scope, name: bytes = b"authorization") -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def request_id_of(scope: Scope, prefix: str) -> str:
    """The client's own, where it is one that a log can hold; else a new one."""
    own = header(scope, b"x-request-id").decode("latin-1")
    return own if _REQUEST_ID.fullmatch(own) else f"{prefix}-{uuid.uuid4().hex}"


class JsonEndpoint:
    """An endpoint that answers a body with one JSON value; a client that goes ends what it has begun."""

    def __init__(self, answering: Answering, triton: Callable[[], Triton], max_body_bytes: int, prefix: str) -> None:
        self._answering = answering
        self._triton = triton
        self._max_body_bytes = max_body_bytes
        self._prefix = prefix  # of the requests' ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope, self._prefix)
        try:
            body = read_body(await read_all(receive, self._max_body_bytes))
            await until_gone(receive, self._answer(body, request_id, scope, receive, send))
        except ClientGone:
            pass
        except ApiError as error:
            await error_response(error, request_id)(scope, receive, send)

    async def _answer(self, body: Body, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        names = frozenset(body.left)
        try:
            value = await self._answering(body, self._triton(), request_id)
        except ApiError as error:
            error.find_param(names)
            raise
        await json_response(value, headers={"x-request-id": request_id})(scope, receive, send)
