"""HTTP as this gateway needs it: a body with a limit, and work that ends when the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive, Send

from cb_backend.gateway.bodies import check_size


class ClientGone(Exception):  # noqa: N818 it is nobody's mistake
    """The client has closed the connection."""


async def read_all(receive: Receive, most: int) -> bytes:
    """The whole body. Raises `ApiError` 413 beyond `most` bytes, `ClientGone`."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        check_size(size, most)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does `work`, and cancels it where the client goes before: what it has begun at the server ends with it."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_gone(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
    finally:
        watcher.cancel()
        worker.cancel()
        await asyncio.gather(watcher, worker, return_exceptions=True)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """Server-sent events. The response begins with the first event, so that an early error is a status of its own."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send = send
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # a proxy must pass on what it gets
            **headers,
        }
        self.has_begun = False

    async def _begin(self) -> None:
        self.has_begun = True
        pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in self._headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": pairs})

    async def push(self, events: list[bytes]) -> None:
        """Sends JSON texts, each as an event, in one piece."""
        if not self.has_begun:
            await self._begin()
        body = b"".join([b"data: " + event + b"\n\n" for event in events])
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        if not self.has_begun:  # there was nothing to say
            await self._begin()
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
