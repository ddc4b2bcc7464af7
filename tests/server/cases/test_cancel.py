"""Kind N, clients that leave: blocks, slots and gauges come back, and nobody else notices."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.server.cases.conftest import Floor
from tests.server.cases.test_ends import hash_output
from tests.server.cases.transports import TRANSPORTS, Wire, infer_request
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.server
LONG = {"max_tokens": 4000}


def answers_rightly(wire: Wire, model: str) -> None:
    for transport in TRANSPORTS:
        assert wire.ask(transport, model, {"max_tokens": 4}, input_ids=[9, 9]).output_ids() == hash_output([9, 9], 4)


def test_n1_n3_a_thousand_streams_cut_after_a_few_tokens(wire: Wire, floor: Floor) -> None:
    """Cases N1 and N3: cut after 0 to 5 responses, cancelled twice, some after their end; then all is as before."""

    def cut(seed: int) -> None:
        draw = random.Random(seed)
        max_tokens = draw.choice([2, 3000])
        inputs = wire.inputs("grpc_stream", {"max_tokens": max_tokens}, {"input_ids": [seed % 256, seed // 256]})
        call = wire.start("hash", inputs)
        for _, message in zip(range(draw.randint(0, 5)), call, strict=False):
            assert not message.error_message
        for _ in range(draw.randint(1, 2)):
            call.cancel()

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(cut, range(1000)))
    floor.wait_idle("hash")
    answers_rightly(wire, "hash")


@pytest.mark.parametrize("transport", ["grpc_stream", "grpc_single"])
def test_n5_a_queued_request_is_cancelled_without_running(wire: Wire, floor: Floor, transport: str) -> None:
    before = floor.metric("narrow", "cb_prompt_tokens_total")
    running = wire.start("narrow", wire.inputs("grpc_stream", {"max_tokens": 140}, {"input_ids": [1]}))
    next(running)
    queued = wire.start("narrow", wire.inputs(transport, LONG, {"input_ids": [2] * 100}))
    next_one = wire.start("narrow", wire.inputs(transport, {"max_tokens": 4}, {"input_ids": [3]}))
    eventually(lambda: floor.num_waiting("narrow") == 2, "two wait")
    queued.cancel()
    eventually(lambda: floor.num_waiting("narrow") == 1, "the one that was cancelled does not")
    running.cancel()
    reply = wire.collect(next_one)
    assert reply.output_ids() == hash_output([3], 4)
    floor.wait_idle("narrow")
    eventually(lambda: floor.metric("narrow", "cb_prompt_tokens_total") == before + 2, "[1] and [3] were admitted")


def test_n6_stop_stream_with_five_requests_on_one_stream(wire: Wire, floor: Floor) -> None:
    """Case N6, with the public client: all five end, another stream's request goes on."""
    other = wire.start("hash", wire.inputs("grpc_stream", LONG, {"input_ids": [5]}))
    next(other)
    with triton.InferenceServerClient(floor.server.url) as client:
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client.start_stream(lambda result, error: arrived.put((result, error)))
        for index in range(5):
            ids = triton.InferInput("input_ids", [1], "INT32")
            ids.set_data_from_numpy(np.array([index], np.int32))
            stream = triton.InferInput("stream", [1], "BOOL")
            stream.set_data_from_numpy(np.array([True]))
            client.async_stream_infer("hash", [ids, stream], request_id=str(index), parameters=LONG)
        eventually(lambda: floor.num_active("hash") == 6, "six run")
        client.stop_stream(cancel_requests=True)
        floor.server.kept.cancelled.add("hash")
    eventually(lambda: floor.num_active("hash") <= 1, "five have ended")
    assert not next(other).error_message
    other.cancel()
    floor.wait_idle("hash")


@pytest.mark.parametrize("order", range(6))
def test_n8_finish_cancel_and_forget_in_any_order(wire: Wire, floor: Floor, order: int) -> None:
    """Case N8: read to the end, cancel, drop the call, in each order: a no-op where there is nothing left."""

    def finish(call: Any) -> None:
        with contextlib.suppress(grpc.RpcError):  # cancelled before
            for _ in call:
                pass

    actions = [finish, lambda call: call.cancel(), lambda call: None]
    first, second = order // 2, order % 2
    rest = [action for index, action in enumerate(actions) if index != first]
    call = wire.start("hash", wire.inputs("grpc_stream", {"max_tokens": 20}, {"input_ids": [order]}))
    for action in (actions[first], rest[second], rest[1 - second]):
        action(call)
    del call
    floor.wait_idle("hash")
    assert wire.ask("grpc_stream", "hash", {"max_tokens": 2}, input_ids=[1]).error is None


def test_n9_an_error_and_the_final_flag_are_one_message(wire: Wire) -> None:
    """Case N9: also where the client asks for gRPC's own errors, which end the stream.

    NOTE: one request a stream. The server of 24.10 ends with a segmentation fault when a second one on a stream that
    it has closed for such an error gets its answer, whatever the model.
    """
    bad = infer_request("hash", wire.inputs("grpc_stream", {"max_tokens": 0}, {"input_ids": [1]}))
    messages = list(wire.stub.ModelStreamInfer(iter([bad]), timeout=WAIT_S))
    assert len(messages) == 1
    assert "max_tokens" in messages[0].error_message
    for _ in range(20):
        with pytest.raises(grpc.RpcError) as raised:
            list(wire.stub.ModelStreamInfer(iter([bad]), timeout=WAIT_S, metadata=(("triton_grpc_error", "true"),)))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "max_tokens" in raised.value.details()
    answers_rightly(wire, "hash")


@pytest.mark.parametrize("num_read", [0, 200])
def test_n1_http_clients_that_leave(floor: Floor, wire: Wire, num_read: int) -> None:
    """40 `generate_stream` clients close after so many bytes: the server tells at the next response."""
    body = {"input_ids": [4], "stream": True, "sampling_parameters": json.dumps(LONG)}

    def leave(_: int) -> None:
        connection = http.client.HTTPConnection(floor.server.process.http_address, timeout=WAIT_S)
        connection.request("POST", "/v2/models/hash/generate_stream", json.dumps(body))
        if num_read:
            connection.getresponse().read(num_read)
        connection.close()

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(leave, range(40)))
    floor.wait_idle("hash")
    answers_rightly(wire, "hash")


def test_the_server_refuses_unary_calls_by_itself(wire: Wire) -> None:
    """What no decoupled model can have: one gRPC call with one answer. The reason is the server's."""
    with pytest.raises(grpc.RpcError, match="decoupled"):
        wire.stub.ModelInfer(infer_request("hash", {"input_ids": [1]}), timeout=WAIT_S)
