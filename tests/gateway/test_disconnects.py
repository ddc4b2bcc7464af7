"""Clients that go away at any moment leave nothing: no request at the engine, no block, no file of the gateway's."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
from pathlib import Path

import pytest

from tests.gateway.conftest import running_gateway
from tests.server.conftest import RunningServer
from tests.waiting import eventually

pytestmark = pytest.mark.server

PROMPT = "the quick brown fox"
AT_A_TIME = 16


def one_that_leaves(port: int, draw: random.Random) -> socket.socket:
    """A connection that will be left: within its head or body, or after some of its answer."""
    body: dict[str, object] = {"model": "llm", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
    body |= {"stream": draw.random() < 0.7, "n": 1}
    path = draw.choice(["chat/completions", "completions"])
    if path == "completions":
        body["prompt"] = draw.choice([PROMPT, [PROMPT, PROMPT]])
    else:
        body["messages"] = [{"role": "user", "content": PROMPT}]
    data = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: here\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    whole = head + data
    connection.sendall(whole if draw.random() < 0.8 else whole[: draw.randrange(1, len(whole))])
    return connection


def leave(connection: socket.socket, draw: random.Random) -> None:
    """At once, after waiting a moment, or after the first bytes; with a reset or without."""
    connection.settimeout(draw.choice([0.001, 0.05, 0.3]))
    if draw.random() < 0.7:
        with contextlib.suppress(TimeoutError):
            connection.recv(draw.choice([1, 500, 5000]))
    if draw.random() < 0.5:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def gateway_pid(port: int) -> int:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"openai" in words and str(port).encode() in words:
                    return int(folder.name)
    pytest.fail(f"no gateway listens on {port}")


@pytest.mark.parametrize("number", [100, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.long])])
def test_disconnects_leave_nothing(gateway_server: RunningServer, number: int) -> None:
    draw = random.Random(number)
    gateway_server.kept.cancelled.add("llm")
    with running_gateway(gateway_server.url) as address:
        port = int(address.rpartition(":")[2])
        pid = gateway_pid(port)
        expected = gateway_server.client.generate(PROMPT, max_tokens=8, temperature=0)
        leave(one_that_leaves(port, random.Random(0)), draw)  # the connection to the server is there from now on
        gateway_server.wait_idle()
        before = open_files(pid)
        for _ in range(0, number, AT_A_TIME):
            for connection in [one_that_leaves(port, draw) for _ in range(AT_A_TIME)]:
                leave(connection, draw)
        gateway_server.wait_idle()
        eventually(lambda: open_files(pid) <= before, "the gateway has closed every connection")
        # One whose client has left may have been on its way to the server all the time.
        eventually(lambda: gateway_server.num_used_blocks() == 0, "no block is held")
        assert gateway_server.client.generate(PROMPT, max_tokens=8, temperature=0) == expected
