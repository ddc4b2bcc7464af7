"""Fuzzed requests at a real server, over gRPC and HTTP, while canaries ask the same things again and again.

Every request ends with one final response or one clear error; no process of the server ends; the canaries' answers
stay what they were before.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from cb_backend.cli.server.processes import descendants
from tests.fuzz.in_process import shown
from tests.fuzz.mutations import FuzzedRequest, make_request
from tests.server.cases.case import assert_clean
from tests.server.cases.transports import Reply, Wire, add_response, service_pb2
from tests.server.conftest import RunningServer
from tests.waiting import WAIT_S

NUM_CLIENTS = 8
DTYPES = {"bool": "BOOL", "object": "BYTES", "int32": "INT32", "int64": "INT64", "float32": "FP32", "float64": "FP64"}
# Errors of our own that would hide a finding: something unexpected happened inside.
_INTERNAL = re.compile(r"could not be processed|could not be sent|could not compute|engine ended|engine process")

CANARIES: list[tuple[str, dict[str, Any], str]] = [
    ("grpc_stream", {"temperature": 0, "max_tokens": 12, "ignore_eos": True}, "the quick"),
    ("grpc_single", {"temperature": 0.9, "seed": 5, "max_tokens": 12, "n": 2}, "fox"),
    ("http_stream", {"temperature": 1.1, "seed": 6, "max_tokens": 12, "logit_bias": {"5": 2}}, "東京"),
    ("http_generate", {"temperature": 0, "max_tokens": 8, "repetition_penalty": 1.2}, "def add(a, b):"),
]


class Canaries:
    """Four threads that each repeat a request whose answer is known."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._expected = [self._ask(canary) for canary in CANARIES]
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(len(CANARIES))
        self._runs = [self._pool.submit(self._run, *pair) for pair in zip(CANARIES, self._expected, strict=True)]

    def _ask(self, canary: tuple[str, dict[str, Any], str]) -> list[str]:
        transport, sampling, prompt = canary
        reply = self._wire.ask(transport, "llm", sampling, text_input=prompt)
        assert reply.error is None, f"canary {canary}: {reply.error}"
        return [reply.text(answer) for answer in range(len(reply.responses[-1]["text_output"]))]

    def _run(self, canary: tuple[str, dict[str, Any], str], expected: list[str]) -> int:
        for count in itertools.count():
            if self._is_over.is_set():
                return count
            got = self._ask(canary)
            assert got == expected, f"canary {canary} answered {got} instead of {expected}"
            self._is_over.wait(0.05)
        raise AssertionError

    def close(self) -> int:
        """Stop; returns how many answers were compared. Raises what a canary met."""
        self._is_over.set()
        return sum(run.result() for run in self._runs)


def fuzz(server: RunningServer, wire: Wire, seed: int, start: int, count: int) -> Counter[str]:
    """Requests start to start + count of a seed, half over gRPC, half over HTTP. Returns counts of outcomes.

    Raises `AssertionError` that names seed and index of the first finding.
    """
    processes = {(process.pid, process.start_time) for process in descendants(server.process.pid)}
    canaries = Canaries(wire)
    clients = threading.local()

    def send(index: int) -> str:
        request = make_request(seed, index)
        draw = random.Random(index)
        try:
            if draw.random() < 0.5:
                return send_grpc(wire, request, draw)
            if not hasattr(clients, "http"):
                clients.http = http.client.HTTPConnection(server.process.http_address, timeout=WAIT_S)
            return send_http(clients.http, request, draw)
        except Exception as error:
            raise AssertionError(f"seed {seed}, request {index}: {error!r}\n{shown(request)}") from error

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        counts = Counter(pool.map(send, range(start, start + count), chunksize=1))
    counts["canary answers"] = canaries.close()
    left = {(process.pid, process.start_time) for process in descendants(server.process.pid)}
    assert processes <= left, "a process of the server has ended"
    return counts


def send_grpc(wire: Wire, request: FuzzedRequest, draw: random.Random) -> str:
    """As raw as the protocol allows: tensors as they are, whatever the configuration says; one in eight is cut."""
    message = service_pb2.ModelInferRequest(model_name="llm")
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in json.loads(request.parameters or "{}").items():
        _set_parameter(message.parameters[_utf8(name)], value)
    for name, array in request.inputs.items():
        message.inputs.add(name=_utf8(name), datatype=DTYPES[str(array.dtype)], shape=list(array.shape))
        raw = _joined(array) if array.dtype == object else array.tobytes()
        message.raw_input_contents.append(raw[: draw.randint(0, len(raw))] if draw.random() < 0.125 else raw)
    reply = Reply()
    try:
        for part in wire.stub.ModelStreamInfer(iter([message]), timeout=WAIT_S):
            assert reply.num_finals == 0, "a response after the final one"
            add_response(reply, part)
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
            raise  # it hangs, or the server is gone
        assert_clean(error.details() or "")
        return "grpc: refused by the server"
    assert reply.num_finals == 1, f"{reply.num_finals} final responses"
    return f"grpc: {_outcome(reply)}"


def _utf8(text: str) -> str:
    return text.encode(errors="replace").decode()  # protobuf holds nothing else


def _joined(array: Any) -> bytes:
    return b"".join(len(element).to_bytes(4, "little") + element for element in array.reshape(-1))


def _set_parameter(parameter: Any, value: Any) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = _utf8(str(value))


def send_http(connection: http.client.HTTPConnection, request: FuzzedRequest, draw: random.Random) -> str:
    """`generate` or `generate_stream`; one body in eight is broken as JSON too."""
    values: dict[str, Any] = {name: _as_json(array) for name, array in request.inputs.items()}
    if request.parameters:
        values["parameters"] = json.loads(request.parameters)
    body = json.dumps(values).encode()
    if draw.random() < 0.125:
        at = draw.randrange(len(body))
        body = body[:at] + bytes(draw.randrange(256) for _ in range(3)) + body[at + draw.randint(0, 3) :]
    path = draw.choice(["generate", "generate_stream"])
    try:
        connection.request("POST", f"/v2/models/llm/{path}", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")  # the server repeats broken bytes in errors of its own
    except (http.client.HTTPException, ConnectionError):
        connection.close()  # an error may end the connection; a server that is gone shows at the next one
        return "http: connection closed"
    if response.headers.get_content_type() == "text/event-stream":
        documents = [json.loads(line[len("data: ") :]) for line in text.split("\n") if line.startswith("data: ")]
    else:
        documents = [json.loads(text)]
    errors = [document["error"] for document in documents if "error" in document]
    assert len(errors) <= 1
    return f"http: {_outcome(Reply([{}] * len(documents), errors[0] if errors else None, 1))}"


def _as_json(array: Any) -> Any:
    values = [e.decode(errors="surrogateescape") if isinstance(e, bytes) else e for e in array.reshape(-1).tolist()]
    return (
        values[0]
        if len(values) == 1 and array.ndim == 1
        else np.reshape(np.array(values, object), array.shape).tolist()
    )


def _outcome(reply: Reply) -> str:
    if reply.error is None:
        return "answered"
    assert reply.error, "an error without a text"
    assert not _INTERNAL.search(reply.error), reply.error
    assert_clean(reply.error)
    return "refused"
