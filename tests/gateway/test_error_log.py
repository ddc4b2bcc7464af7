"""What the gateway's log says of answers that are errors, and what pages of other origins may read of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from cb_backend.gateway import app as app_module
from cb_backend.gateway.error_log import error_line
from cb_backend.gateway.errors import ApiError
from cb_backend.gateway.settings import Settings
from cb_backend.gateway.triton import Reply
from tests.gateway.told_server import CHAT, COMPLETION, Server, ask

MESSAGES = [{"role": "user", "content": "a secret"}]


class Failing(Server):
    """Refuses each request, after so many of its texts."""

    def __init__(self, error: ApiError, *texts: str) -> None:
        super().__init__(*texts)
        self._error = error

    async def stream(self, model: str, inputs: Mapping[str, Any], request_id: str) -> AsyncIterator[Reply]:
        for text in self.texts:
            yield Reply([text], ["None"], [], 3, [1])
        raise ApiError(self._error.status, self._error.message)


def test_each_error_is_a_line_without_bodies_and_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (keys := tmp_path / "keys").write_text("sk-own")
    body = {"model": "llm", "messages": MESSAGES, "max_tokens": 0}
    answers = [
        ask(Failing(ApiError(400, "max_tokens must be at least 1, got 0")), CHAT, body),
        ask(Failing(ApiError(503, "the engine starts" + "." * 900)), CHAT, body),
        ask(Server(), CHAT, b"{secret"),
        ask(Server(), "/nowhere%0A?secret=1", b"", method="GET"),
        ask(Server(), CHAT, body, api_key_file=str(keys)),
    ]
    told = [record.getMessage() for record in caplog.records]
    ids = [answer.headers.get("x-request-id", "-") for answer in answers]
    assert told[0] == f"POST {CHAT} 400 {ids[0]} max_tokens must be at least 1, got 0"
    assert told[1] == f"POST {CHAT} 503 {ids[1]} the engine starts" + "." * 183 + "..."
    assert told[2].startswith(f"POST {CHAT} 400 {ids[2]} the body is not JSON")
    assert told[3].startswith("GET /nowhere")
    assert " 404 - there is no " in told[3]
    assert told[4].startswith(f"POST {CHAT} 401 - this gateway needs an API key")
    assert len(told) == 5
    assert not any("secret" in line or "sk-own" in line or "\n" in line for line in told)


def test_what_went_well_and_probes_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert ask(Server("a"), CHAT, {"model": "llm", "messages": MESSAGES}).status_code == 200

    async def probe() -> int:
        app = app_module.create_app(Settings("127.0.0.1:1"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as client:
            return (await client.get("/health")).status_code

    assert asyncio.run(probe()) == 503
    assert caplog.records == []


def test_a_stream_that_breaks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Its status was 200 when it began."""
    body = {"model": "llm", "prompt": "x", "stream": True}
    answer = ask(Failing(ApiError(503, "the engine\nis gone"), "a"), COMPLETION, body)
    assert answer.status_code == 200
    (record,) = caplog.records
    assert record.getMessage() == f"stream of llm 200 {answer.headers['x-request-id']} the engine is gone"


def test_a_line_stays_one_line() -> None:
    assert error_line("GET", "/a\r\n\x1b[2J", 404, "-", "x\u2028y") == "GET /a   [2J 404 - x y"


def test_the_field_that_is_refused_is_told() -> None:
    server = Failing(ApiError(400, "max_tokens must be at least 1, got 0"))
    for sent in ("max_tokens", "max_completion_tokens"):
        answer = ask(server, CHAT, {"model": "llm", "messages": MESSAGES, sent: 0})
        assert answer.json()["error"]["param"] == sent


def test_pages_of_other_origins_may_read_what_clients_need() -> None:
    app = app_module.create_app(Settings("127.0.0.1:1", allow_origins=("http://a",)))

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as client:
            return await client.post(CHAT, content=b"{", headers={"origin": "http://a"})

    exposed = asyncio.run(send()).headers["access-control-expose-headers"].lower().replace(" ", "").split(",")
    assert {"x-request-id", "retry-after", "x-should-retry"} <= set(exposed)
