"""Where the client's modules are found, and the server that tests of it talk to."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.waiting import WAIT_S

CLIENT_DIR = Path(__file__).parents[2] / "client"
sys.path.insert(0, str(CLIENT_DIR))  # its scripts find one another so

from tests.client.scripted_server import ScriptedServer  # noqa: E402


@pytest.fixture
def server() -> Iterator[tuple[ScriptedServer, str]]:
    """(server, its address)."""
    servicer = ScriptedServer()
    loop = asyncio.new_event_loop()

    async def start() -> tuple[Any, int]:
        grpc_server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, grpc_server)
        port = grpc_server.add_insecure_port("127.0.0.1:0")
        await grpc_server.start()
        return grpc_server, port

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    grpc_server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT_S)
    yield servicer, f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(grpc_server.stop(0.2), loop).result(WAIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_S)
