"""Cancellation of streams, errors as gRPC codes, priorities and timeouts, through a real server.

pytest tests/server/test_requests_under_pressure.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

from cb_backend.cli.server.processes import descendants
from tests.faults.processes import shared_memory_mb
from tests.faults.traffic import STREAM_METHOD, message
from tests.server.conftest import MAX_NUM_SEQS, RunningServer
from tests.server.raw_stream import RawStream, _tensor
from tests.server.test_streams import LONG
from tests.server.tiny_checkpoint import Reference
from tests.waiting import eventually

pytestmark = pytest.mark.server

SHORT = {"max_tokens": 8, "temperature": 0}


@pytest.fixture
def full(server: RunningServer) -> Iterator[list[RawStream]]:
    """Every slot of the batch is taken by a request that runs for long."""
    streams = [RawStream(server.url, f"long {i}", LONG) for i in range(MAX_NUM_SEQS)]
    for stream in streams:
        stream.wait(num_texts=1)
    yield streams
    for stream in streams:
        stream.close(cancel=True)
    server.wait_idle()


def test_n6_stopping_a_stream_cancels_all_of_its_requests_and_no_other(
    server: RunningServer, reference: Reference
) -> None:
    connection = triton.InferenceServerClient(server.url)
    connection.start_stream(lambda result, error: None)
    for index in range(5):
        inputs = [_tensor("text_input", "BYTES", b"five on one stream"), _tensor("stream", "BOOL", True)]
        inputs.append(_tensor("sampling_parameters", "BYTES", b'{"max_tokens": 12000, "ignore_eos": true}'))
        connection.async_stream_infer("llm", inputs, request_id=str(index))
    eventually(lambda: server.num_active_requests() == 5, "five requests run on one stream")
    other = RawStream(server.url, "fox", {"max_tokens": 120, "temperature": 0}).wait(num_texts=1)
    connection.stop_stream(cancel_requests=True)
    connection.close()
    other.wait().close()
    assert other.errors == []
    assert other.text == reference.greedy_text("fox", 120)
    server.wait_idle()


def test_n9_an_error_ends_the_stream_with_its_code_where_the_client_asks_for_that(
    server: RunningServer, reference: Reference
) -> None:
    """The error and the final flag are one send, so nothing comes after a stream that the error has closed."""
    neighbour = RawStream(server.url, "queen", {"max_tokens": 60, "temperature": 0})
    parse = service_pb2.ModelStreamInferResponse.FromString
    with grpc.insecure_channel(server.url) as channel:
        call = channel.stream_stream(STREAM_METHOD, None, parse)
        for _ in range(20):
            responses = call(iter([message("x", {"max_tokens": 0})]), metadata=(("triton_grpc_error", "true"),))
            with pytest.raises(grpc.RpcError) as raised:
                list(responses)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "max_tokens" in raised.value.details()
    neighbour.wait().close()
    assert neighbour.text == reference.greedy_text("queen", 60)


def test_u4_requests_that_fail_leave_no_shared_memory(server: RunningServer) -> None:
    processes = [server.process.pid, *(process.pid for process in descendants(server.process.pid))]
    parse = service_pb2.ModelStreamInferResponse.FromString

    def fail(count: int) -> None:
        with grpc.insecure_channel(server.url) as channel:
            call = channel.stream_stream(STREAM_METHOD, None, parse)
            bad = message("x" * 20_000, {"max_tokens": 0})
            responses = list(call(bad for _ in range(count)))
        assert len(responses) == count
        assert all("max_tokens" in response.error_message for response in responses)

    fail(50)  # the regions grow to what this traffic needs
    before = shared_memory_mb(processes)
    assert before > 0
    for _ in range(24):
        fail(50)
    # As much as all of 50 need at once, should they not be taken for a moment; 1200 that stay would need 24 MB.
    assert shared_memory_mb(processes) <= before + 5


def test_o11_priorities_order_the_queue_and_take_running_slots(
    server: RunningServer, reference: Reference, full: list[RawStream]
) -> None:
    late = RawStream(server.url, "late", {**SHORT, "priority": 2})
    eventually(lambda: server.gauge("nv_trt_llm_request_metrics", "waiting") == 1, "it waits")
    normal = RawStream(server.url, "normal", {**LONG, "priority": 1})
    urgent = RawStream(server.url, "urgent", {**SHORT, "priority": -1}).wait()
    assert urgent.text == reference.greedy_text("urgent", 8), "it took the slot of a running request"
    assert (late.num_texts, normal.num_texts) == (0, 0), "these wait: every slot is taken"
    full[0].close(cancel=True)
    normal.wait(num_texts=1)
    assert (late.num_texts, normal.errors) == (0, []), "the one slot is taken by the one that came later"
    normal.close(cancel=True)
    assert late.wait().text == reference.greedy_text("late", 8)
    for stream in (late, urgent):
        stream.close()
    assert all(stream.errors == [] for stream in full[1:]), "the one that gave way goes on"


def test_timeouts_end_waiting_and_running_requests(server: RunningServer, full: list[RawStream]) -> None:
    waiting = RawStream(server.url, "waits", {**SHORT, "queue_timeout_ms": 200}).wait()
    assert waiting.num_texts == 0
    assert "timed out after 200 ms in the queue" in waiting.errors[0]
    full[0].close(cancel=True)
    begin = time.monotonic()
    running = RawStream(server.url, "runs", {**LONG, "timeout_ms": 1500}).wait()
    assert "timed out after 1500 ms" in running.errors[0]
    assert running.num_finals == 1
    assert time.monotonic() - begin > 1.4
    for stream in (waiting, running):
        stream.close()
