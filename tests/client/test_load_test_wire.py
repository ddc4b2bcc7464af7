"""One request of the load test on the wire, against a scripted server. pytest tests/client/test_load_test_wire.py"""

from __future__ import annotations

import json

import grpc
import pytest
from load_generator.options import drawn_names, parser, wire_options
from load_generator.records import Status
from load_generator.wire import WireOptions, is_refusal, service_pb2

from tests.client.scripted_server import Script, ScriptedServer, send
from tests.waiting import eventually

# One request


def test_chunk_times_and_counts_agree_with_the_server(server: tuple[ScriptedServer, str]) -> None:
    servicer, address = server
    servicer.script = lambda index, request: Script([(0.08, 1), (0.03, 1), (0.05, 4), (0.02, 2)])
    record = send(address)
    assert list(record.chunk_tokens) == [1, 1, 4, 2]
    assert (record.num_output_tokens, record.num_responses) == (8, 4)
    assert (record.status, record.is_final, record.finish_reason) == (Status.OK, True, "length")
    for received, sent in zip(record.chunk_times, servicer.sent_at["0"], strict=True):
        assert received >= sent
    assert record.chunk_times[0] - record.sent_s >= 0.08
    assert record.end_s == record.chunk_times[-1]


def test_request_on_the_wire(server: tuple[ScriptedServer, str]) -> None:
    servicer, address = server
    send(address, wire=WireOptions(model="m", sampling={"temperature": 0.5}))
    (request,) = servicer.requests
    assert (request["model"], request["text_input"], request["stream"]) == ("m", "a b", True)
    assert json.loads(request["sampling_parameters"]) == {
        "max_tokens": 8,
        "min_tokens": 8,
        "ignore_eos": True,
        "temperature": 0.5,
    }
    assert request["exclude_input_in_output"] is True
    assert request["parameters"]["triton_enable_empty_final_response"].bool_param is True
    assert "return_num_input_tokens" not in request


def test_final_flag_alone_is_no_token(server: tuple[ScriptedServer, str]) -> None:
    servicer, address = server
    servicer.script = lambda index, request: Script([(0.0, 2)], has_empty_final=True)
    record = send(address)
    assert (record.status, record.num_output_tokens, record.num_responses) == (Status.OK, 2, 2)
    assert record.end_s >= record.chunk_times[-1]


def test_server_without_counts_has_one_token_a_response(server: tuple[ScriptedServer, str]) -> None:
    servicer, address = server
    servicer.script = lambda index, request: Script([(0.0, 3), (0.0, 3)])
    wire = WireOptions(has_token_counts=False, has_finish_reason=False)
    record = send(address, wire=wire, has_token_counts=False)
    assert "return_num_output_tokens" not in servicer.requests[0]
    assert (list(record.chunk_tokens), record.finish_reason, record.status) == ([1, 1], None, Status.OK)


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        (Script([(0, 1)], error=(grpc.StatusCode.INVALID_ARGUMENT, "top_p too high")), Status.ERROR, "top_p too high"),
        (Script([], error=(grpc.StatusCode.UNAVAILABLE, "the queue is full")), Status.REFUSED, "the queue is full"),
        (Script([], error_message="Exceeds maximum queue size"), Status.REFUSED, "Exceeds maximum queue size"),
        (Script([(0, 1)], error_message="broken"), Status.ERROR, "broken"),
        (Script([(0, 1)], ends_without_final=True), Status.ERROR, "without a final response"),
    ],
)
def test_failures_are_results(server: tuple[ScriptedServer, str], script: Script, status: Status, text: str) -> None:
    servicer, address = server
    servicer.script = lambda index, request: script
    record = send(address)
    assert record.status is status
    assert text in (record.error or "")
    assert record.num_output_tokens == sum(num for _, num in script.chunks)


def test_nobody_listens_is_an_error_not_a_refusal() -> None:
    record = send("127.0.0.1:1")
    assert record.status is Status.ERROR
    assert "connect" in (record.error or "").lower()
    assert is_refusal(grpc.StatusCode.UNAVAILABLE, "engine restarting")


def test_cancel_after_tokens_reaches_the_server(server: tuple[ScriptedServer, str]) -> None:
    servicer, address = server
    servicer.script = lambda index, request: Script([(0.01, 1)] * 100_000)
    record = send(address, cancel_after_tokens=3)
    assert (record.status, record.num_output_tokens, record.is_final) == (Status.CANCELLED, 3, False)
    eventually(lambda: servicer.num_cancelled == 1, "the server hears of it")
    assert len(servicer.sent_at["0"]) < 100_000


def test_request_timeout(server: tuple[ScriptedServer, str]) -> None:
    servicer, address = server
    servicer.script = lambda index, request: Script([(30.0, 1)])
    record = send(address, timeout_s=0.1)
    assert record.status is Status.ERROR
    assert (record.error or "").startswith("DEADLINE_EXCEEDED")


def test_requests_draw_the_same_adapters_whenever_they_are_sent() -> None:
    names = drawn_names(("sheep", "doll", "cat", "dog"), 1.0)
    wire = WireOptions(lora_names=names, sampling={"temperature": 0.6})
    drawn = [wire.lora_name(str(index)) for index in range(4000)]
    assert drawn == [wire.lora_name(str(index)) for index in range(4000)]
    shares = [drawn.count(name) / len(drawn) for name in ("sheep", "doll", "cat", "dog")]
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.03), "Zipf's law of exponent 1"
    message = service_pb2.ModelInferRequest.FromString(wire.request("warm-7", "a b", 3))
    parameters = json.loads(message.raw_input_contents[1][4:])
    assert parameters["lora_name"] == wire.lora_name("warm-7")
    assert parameters["temperature"] == 0.6


def test_without_adapters_no_request_names_one() -> None:
    message = service_pb2.ModelInferRequest.FromString(WireOptions().request("0", "a b", 3))
    assert "lora_name" not in json.loads(message.raw_input_contents[1][4:])
    assert drawn_names((), 1.0) == ()


def test_every_name_is_drawn_however_rare() -> None:
    names = tuple(f"a{index}" for index in range(40))
    assert set(drawn_names(names, 3.0)) == set(names)
    alike = drawn_names(names, 0.0)
    assert len({alike.count(name) for name in names}) == 1


def test_names_come_from_the_command_line() -> None:
    args = parser().parse_args(["--rate", "inf", "--lora-names", "sheep,doll", "--lora-skew", "0"])
    assert set(wire_options(args).lora_names) == {"sheep", "doll"}
    assert wire_options(parser().parse_args(["--rate", "inf"])).lora_names == ()
