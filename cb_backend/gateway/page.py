"""The page at `/`: what is served, a box to try it, links. One file without outside resources.

It says nothing by itself: it asks `/v1/models` as any client does, with the key that its reader has typed in. Without a
right key it stays empty.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

PAGE = Path(__file__).with_name("page.html")
# The page's own script and style, and this gateway: nothing is fetched from or sent to anywhere else.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@lru_cache(maxsize=1)
def page() -> bytes:
    return PAGE.read_bytes()


async def show_page(request: Request) -> Response:
    headers = {"content-security-policy": POLICY, "referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}
    return Response(page(), media_type="text/html", headers=headers)
