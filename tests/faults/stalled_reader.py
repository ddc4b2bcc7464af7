"""A client that asks for much and never reads: its side of the connection fills up and stays full."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import grpc

from tests.faults.traffic import LONG_TOKENS, METADATA, STREAM_METHOD, message


class StalledReader:
    """A context in which the request is open. On leaving it the client goes without a word."""

    def __init__(self, url: str) -> None:
        choices = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", 0)]
        self._channel = grpc.insecure_channel(url, options=choices)

    def __enter__(self) -> StalledReader:
        def requests() -> Iterator[bytes]:
            yield message("never read", {"max_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True})

        self._call = self._channel.stream_stream(STREAM_METHOD, None, None)(requests(), metadata=METADATA)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._call.cancel()
        self._channel.close()
