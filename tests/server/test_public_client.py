"""Call patterns of the public client's examples for decoupled models, with tritonclient itself on our model.

Many requests in a row on one stream, told apart by their ids; empty final responses on demand; leaving a stream with
and without cancelling it; the asyncio client's iterator.
"""

from __future__ import annotations

import asyncio
import json
import queue
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio

from tests.server.conftest import RunningServer
from tests.server.test_streams import LONG
from tests.server.tiny_checkpoint import Reference
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.server

GREEDY = {"max_tokens": 12, "temperature": 0}


def inputs(prompt: str, sampling: dict[str, Any]) -> list[grpc.InferInput]:
    text = grpc.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    stream = grpc.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    params = grpc.InferInput("sampling_parameters", [1], "BYTES")
    params.set_data_from_numpy(np.array([json.dumps(sampling).encode()], dtype=np.object_))
    return [text, stream, params]


@pytest.mark.parametrize("asks_for_empty_finals", [False, True])
def test_eight_requests_in_a_row_on_one_stream(
    server: RunningServer, reference: Reference, asks_for_empty_finals: bool
) -> None:
    prompts = {str(index): f"fox {index}" for index in range(8)}
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    texts: dict[str, str] = defaultdict(str)
    num_finals: dict[str, int] = defaultdict(int)
    with grpc.InferenceServerClient(server.url) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        for request_id, prompt in prompts.items():
            client.async_stream_infer(
                "llm",
                inputs(prompt, GREEDY),
                request_id=request_id,
                enable_empty_final_response=asks_for_empty_finals,
            )
        while sum(num_finals.values()) < len(prompts):
            result, error = arrived.get(timeout=WAIT_S)
            assert error is None
            response = result.get_response()
            texts[response.id] += result.as_numpy("text_output")[0].decode()
            num_finals[response.id] += response.parameters["triton_final_response"].bool_param
        client.stop_stream()
    assert arrived.empty()
    assert num_finals == dict.fromkeys(prompts, 1)
    assert texts == {key: reference.greedy_text(prompt, 12) for key, prompt in prompts.items()}


def test_a_stream_is_left_only_when_its_requests_have_ended(server: RunningServer, reference: Reference) -> None:
    """`stop_stream()` waits; nothing of the answers is lost."""
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpc.InferenceServerClient(server.url) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer("llm", inputs("the quick", GREEDY))
        client.stop_stream()
    pieces = [arrived.get_nowait()[0].as_numpy("text_output")[0].decode() for _ in range(arrived.qsize())]
    assert "".join(pieces) == reference.greedy_text("the quick", 12)


def test_a_stream_is_cancelled_and_the_client_starts_another(server: RunningServer, reference: Reference) -> None:
    with grpc.InferenceServerClient(server.url) as client:
        for _ in range(3):
            arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()  # the end of a stream comes late
            client.start_stream(lambda result, error, arrived=arrived: arrived.put((result, error)))
            for index in range(4):
                client.async_stream_infer("llm", inputs(f"long {index}", LONG))
            _, error = arrived.get(timeout=WAIT_S)
            client.stop_stream(cancel_requests=True)
            assert error is None
        server.wait_idle()
    assert server.client.generate("fox", **GREEDY) == reference.greedy_text("fox", 12)


def test_the_asyncio_clients_iterator(server: RunningServer, reference: Reference) -> None:
    async def run() -> tuple[list[str], bool]:
        async with grpc_aio.InferenceServerClient(server.url) as client:

            async def requests() -> Any:
                for prompt in ("fox", "queen"):
                    yield {"model_name": "llm", "inputs": inputs(prompt, GREEDY), "request_id": prompt}

            texts: dict[str, str] = defaultdict(str)
            async for result, error in client.stream_infer(requests()):
                assert error is None
                texts[result.get_response().id] += result.as_numpy("text_output")[0].decode()

            async def one_long() -> Any:
                yield {"model_name": "llm", "inputs": inputs("long", LONG)}

            responses = client.stream_infer(one_long())
            async for _ in responses:
                is_cancelled = responses.cancel()
                break
            return [texts["fox"], texts["queen"]], is_cancelled

    texts, is_cancelled = asyncio.run(run())
    assert texts == [reference.greedy_text(prompt, 12) for prompt in ("fox", "queen")]
    assert is_cancelled
    eventually(lambda: server.num_active_requests() == 0, "the cancelled request has ended")
