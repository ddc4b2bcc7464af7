"""One request over each way into the server, and one form for what came back.

    grpc_stream      ModelStreamInfer, stream = true: a response for each piece
    grpc_single      ModelStreamInfer, stream = false: one response
    http_stream      POST generate_stream, stream = true
    http_generate    POST generate

(The server itself refuses ModelInfer, unary gRPC, and POST infer for every decoupled model: see `test_refusals`.)
Knows names and types of tensors, not their meanings.
"""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.waiting import WAIT_S

TRANSPORTS = ("grpc_stream", "grpc_single", "http_stream", "http_generate")
RETURNS = (
    "finish_reason", "logprobs", "cumulative_logprob", "num_input_tokens", "num_output_tokens", "stop_reason",
    "output_ids",
)  # fmt: skip

Outputs = dict[str, list[Any]]  # by name, an element an answer


@dataclass
class Reply:
    """Every response to one request, in order. `error` ends it."""

    responses: list[Outputs] = field(default_factory=list)
    error: str | None = None
    num_finals: int = 0

    def text(self, answer: int = 0) -> str:
        return "".join(self.pieces(answer))

    def pieces(self, answer: int = 0) -> list[str]:
        return [response["text_output"][answer] for response in self.responses]

    def last(self, name: str, answer: int = 0) -> Any:
        return self.responses[-1][name][answer]

    def num_tokens(self, answer: int = 0) -> int:
        return sum(response["num_output_tokens"][answer] for response in self.responses)

    def logprobs(self, answer: int = 0) -> list[dict[str, dict[str, Any]]]:
        """The figures of each token: {token id: {"logprob", "rank", "decoded_token"}}."""
        return [entry for response in self.responses for entry in json.loads(response["logprobs"][answer])]

    def output_ids(self) -> list[int]:
        """Of a request with one answer."""
        return [token_id for response in self.responses for token_id in response["output_ids"]]


class Wire:
    """Clients of one server. Any number of threads may ask at once."""

    def __init__(self, grpc_address: str, http_address: str, cancelled: set[str] | None = None) -> None:
        """`cancelled` gets the name of each model of which a gRPC stream was cancelled, or dropped before its end."""
        self._http_address = http_address
        self._cancelled = set() if cancelled is None else cancelled
        self._channel = grpc.insecure_channel(grpc_address)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def ask(self, transport: str, model: str, sampling: dict[str, Any] | str | None = None, **inputs: Any) -> Reply:
        """One request with every output asked for. `sampling` as an object or as JSON text."""
        values = self.inputs(transport, sampling, inputs)
        if transport.startswith("grpc"):
            call = self.start(model, values)
            return self.collect(call)
        path = "generate_stream" if transport == "http_stream" else "generate"
        return self._post(f"/v2/models/{model}/{path}", values)

    @staticmethod
    def inputs(transport: str, sampling: dict[str, Any] | str | None, inputs: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {f"return_{name}": True for name in RETURNS}
        values |= {"stream": transport.endswith("stream"), "exclude_input_in_output": True}
        if sampling is not None:
            values["sampling_parameters"] = sampling if isinstance(sampling, str) else json.dumps(sampling)
        return values | inputs

    def start(self, model: str, inputs: dict[str, Any]) -> Any:
        """A gRPC stream of its own with this one request on it: an iterator of responses that can be cancelled."""
        call = self.stub.ModelStreamInfer(iter([infer_request(model, inputs)]), timeout=WAIT_S)
        call.add_done_callback(lambda ended: self._cancelled.add(model) if ended.cancelled() else None)
        return call

    @staticmethod
    def collect(call: Any) -> Reply:
        """Read a stream to its end."""
        reply = Reply()
        for message in call:
            assert reply.num_finals == 0, "a response after the final one"
            add_response(reply, message)
        return reply

    def _post(self, path: str, body: dict[str, Any]) -> Reply:
        connection = http.client.HTTPConnection(self._http_address, timeout=WAIT_S)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        # A stream that has begun keeps its status 200 and tells of an error as an event.
        is_stream = response.headers.get_content_type() == "text/event-stream"
        documents = [json.loads(line[len("data: ") :]) for line in text.split("\n") if line.startswith("data: ")]
        reply = Reply(num_finals=1)
        for document in documents if is_stream else [json.loads(text)]:
            if "error" in document:
                assert reply.error is None, "two errors"
                reply.error = document["error"]
            else:
                reply.responses.append({name: _as_list(value) for name, value in document.items()})
        assert is_stream or (response.status == 200) == (reply.error is None)
        return reply


def infer_request(model: str, inputs: dict[str, Any], request_id: str = "") -> Any:
    """A `ModelInferRequest`: bool, str, bytes, or a list of int32 a tensor. Asks for final flags of their own."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in inputs.items():
        datatype, shape, raw = _encoded(value)
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(raw)
    return request


def add_response(reply: Reply, message: Any) -> None:
    """Take one `ModelStreamInferResponse` in."""
    if message.error_message:
        reply.error = message.error_message
        reply.num_finals += 1
        return
    response = message.infer_response
    outputs = {
        output.name: list(_decoded(output.datatype, raw))
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    if outputs:
        reply.responses.append(outputs)
    reply.num_finals += response.parameters["triton_final_response"].bool_param


def _encoded(value: Any) -> tuple[str, list[int], bytes]:
    if isinstance(value, bool):
        return "BOOL", [1], struct.pack("?", value)
    if isinstance(value, str | bytes):
        data = value.encode() if isinstance(value, str) else value
        return "BYTES", [1], struct.pack("<I", len(data)) + data
    return "INT32", [len(value)], struct.pack(f"<{len(value)}i", *value)


_FORMATS = {"INT32": "<i", "UINT32": "<I", "FP32": "<f", "BOOL": "?"}


def _decoded(datatype: str, raw: bytes) -> Iterator[Any]:
    if datatype != "BYTES":
        yield from (value for (value,) in struct.iter_unpack(_FORMATS[datatype], raw))
        return
    at = 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        yield raw[at + 4 : at + 4 + length].decode()  # each piece must be valid UTF-8 by itself
        at += 4 + length


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
