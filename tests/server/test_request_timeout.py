"""The server's own request timeout, as gRPC clients set it. pytest tests/server/test_request_timeout.py"""

from __future__ import annotations

import json
import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from tests.server.conftest import RunningServer
from tests.waiting import WAIT_S

pytestmark = pytest.mark.server


def ask(server: RunningServer, sampling: dict[str, Any], timeout_us: int | None) -> tuple[str, str]:
    """(text, error) of one request that does not stream."""
    inputs = []
    for name, datatype, value in (
        ("text_input", "BYTES", b"fox"),
        ("exclude_input_in_output", "BOOL", True),
        ("sampling_parameters", "BYTES", json.dumps(sampling).encode()),
    ):
        inputs.append(grpc.InferInput(name, [1], datatype))
        inputs[-1].set_data_from_numpy(np.array([value], dtype=bool if datatype == "BOOL" else object))
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpc.InferenceServerClient(server.url) as connection:
        connection.start_stream(lambda result, error: arrived.put((result, error)))
        connection.async_stream_infer("llm", inputs, timeout=timeout_us)
        result, error = arrived.get(timeout=WAIT_S)
        connection.stop_stream()
    if error is not None:
        return "", error.message()
    return result.as_numpy("text_output")[0].decode(), ""


def test_a_request_ends_at_the_timeout_that_the_server_was_told(server: RunningServer) -> None:
    """In microseconds; of it and of timeout_ms the shorter counts, and its blocks are free after it."""
    endless = {"max_tokens": 15000, "temperature": 0, "ignore_eos": True}
    for sampling, timeout_us in ((endless, 400_000), ({**endless, "timeout_ms": 400}, 600_000_000)):
        text, error = ask(server, sampling, timeout_us)
        assert text == ""
        assert "timed out after 400 ms" in error
    server.wait_idle()
    text, error = ask(server, {**endless, "max_tokens": 4}, 600_000_000)
    assert (bool(text), error) == (True, "")
