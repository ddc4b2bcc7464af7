"""A line of the log for each answer that is an error: what clients were told, without what they have sent."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

MAX_TEXT = 200  # characters of an error, which may repeat what a client has sent
MAX_PATH = 200

logger = logging.getLogger("cb_backend.gateway")


class ErrorLog:
    """Logs method, path, status, request id and the error's text of each answer with a status of 400 and more.

    Bodies of requests, query strings and keys are not logged; neither are answers to the paths `left_out`.
    """

    def __init__(self, app: ASGIApp, left_out: Collection[str] = ()) -> None:
        self._app = app
        self._left_out = left_out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._left_out:
            return await self._app(scope, receive, send)
        failed: dict[str, Any] | None = None  # how the answer began, where it is an error

        async def watched(message: Any) -> None:
            nonlocal failed
            if failed is not None and message["type"] == "http.response.body":
                request_id = dict(failed["headers"]).get(b"x-request-id", b"-").decode("latin-1")
                text = _text_of(message.get("body", b""))
                logger.warning("%s", error_line(scope["method"], scope["path"], failed["status"], request_id, text))
                failed = None
            elif message["type"] == "http.response.start" and message["status"] >= 400:
                failed = message
            await send(message)

        return await self._app(scope, receive, watched)


def error_line(method: str, path: str, status: int, request_id: str, text: str) -> str:
    """One line, whatever the parts hold that a client has sent."""
    return " ".join([method, _plain(path, MAX_PATH), str(status), request_id, _plain(text, MAX_TEXT)])


def _plain(text: str, most: int) -> str:
    """Cut, and without what would be a line of its own or move a terminal's cursor."""
    line = "".join(character if character.isprintable() else " " for character in text[: most + 1])
    return line if len(line) <= most else line[:most] + "..."


def _text_of(body: bytes) -> str:
    """An error's message; of an answer in another form its beginning."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[: 4 * MAX_TEXT].decode("utf-8", errors="replace")
