"""One request over the server's gRPC stream, with as little work per response as Python allows.

Raw `grpc.aio` calls with the messages of tritonclient: requests are serialised ahead of time, a response costs one
parse and a look at three tensors. Each request has a stream (an RPC) of its own, so that cancelling it cancels
nothing else; several streams share a connection. Knows nothing of schedules.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from .records import RequestRecord, Status

STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
# NOTE: no metadata "triton_grpc_error", which would bring an error's code: server 24.10 was seen to crash under many
# refusals with it (python -m tests.faults.overload). An error comes as its text.
REFUSAL_WORDS = ("maximum queue size", "queue is full", "unavailable", "overloaded", "try again")
TRANSPORT_WORDS = ("connect", "socket closed", "connection reset", "name resolution", "dns", "goaway", "transport")
NEEDED_INPUTS = ("text_input", "stream", "sampling_parameters")  # without one of them no request can be taken
NO_FINISH_REASON = b"\x04\x00\x00\x00None"  # the BYTES tensor of a request that still runs


@dataclass(frozen=True)
class WireOptions:
    """What is asked of the server beside the prompt; fields it may lack can be left out."""

    model: str = "llm"
    has_token_counts: bool = True  # ask for num_output_tokens; without it a response with text counts as one token
    has_finish_reason: bool = True
    has_input_counts: bool = False  # ask for num_input_tokens: a tensor more on every response
    sampling: dict[str, Any] = field(default_factory=dict)  # beside the lengths: temperature, seed, ...
    lora_names: tuple[str, ...] = ()  # adapters that requests draw from, each as often as it stands there

    def lora_name(self, request_id: str) -> str | None:
        """Always the same one for a request; None: the model as it is."""
        if not self.lora_names:
            return None
        return self.lora_names[zlib.crc32(request_id.encode()) % len(self.lora_names)]

    def request(self, request_id: str, prompt: str, num_output_tokens: int) -> bytes:
        """The serialised request for exactly `num_output_tokens` tokens."""
        lengths = {"max_tokens": num_output_tokens, "min_tokens": num_output_tokens, "ignore_eos": True}
        name = self.lora_name(request_id)
        adapter = {} if name is None else {"lora_name": name}
        message = service_pb2.ModelInferRequest(model_name=self.model, id=request_id)
        # Final flags that come alone, after the last data, reach the client only on demand.
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        _add_text(message, "text_input", prompt)
        _add_text(message, "sampling_parameters", json.dumps({**lengths, **adapter, **self.sampling}))
        flags = {
            "stream": True,
            "exclude_input_in_output": True,
            "return_num_output_tokens": self.has_token_counts,
            "return_finish_reason": self.has_finish_reason,
            "return_num_input_tokens": self.has_input_counts,
        }
        for name in (name for name, is_set in flags.items() if is_set):
            message.inputs.add(name=name, datatype="BOOL", shape=[1])
            message.raw_input_contents.append(b"\x01")
        return bytes(message.SerializeToString())


def _add_text(message: Any, name: str, text: str) -> None:
    data = text.encode()
    message.inputs.add(name=name, datatype="BYTES", shape=[1])
    message.raw_input_contents.append(len(data).to_bytes(4, "little") + data)


@asynccontextmanager
async def open_connections(url: str, count: int) -> Any:
    """`count` connections to `url`; yields an iterator that hands out their stream methods in turn."""
    # Without a pool of its own every channel to the same address would share one connection.
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
    ]
    channels = [grpc.aio.insecure_channel(url, options=options) for _ in range(count)]
    parse = service_pb2.ModelStreamInferResponse.FromString
    try:
        yield cycle([channel.stream_stream(STREAM_METHOD, None, parse) for channel in channels])
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


async def exchange(
    open_stream: Callable[..., Any],
    request: bytes,
    record: RequestRecord,
    clock: Callable[[], float],
    *,
    has_token_counts: bool = True,
    cancel_after_tokens: int | None = None,
    timeout_s: float | None = None,
) -> None:
    """Send `request` and fill `record` until its end. Raises nothing of the network: an error is a result.

    Cancelling the task that awaits this cancels the request at the server and leaves the record UNFINISHED.
    """
    record.sent_s = clock()
    call = None
    try:
        call = open_stream(timeout=timeout_s)
        await call.write(request)
        record.written_s = clock()
        await call.done_writing()
        if cancel_after_tokens == 0:
            call.cancel()
            record.status = Status.CANCELLED
        else:
            await _receive(call, record, clock, has_token_counts, cancel_after_tokens)
    except asyncio.CancelledError:
        record.end_s = clock()
        if call is not None:
            call.cancel()
    except grpc.aio.AioRpcError as error:
        _fail(record, clock(), error.code(), error.details() or error.code().name)
    except Exception as error:  # one broken request must never end the run
        _fail(record, clock(), None, f"{type(error).__name__}: {error}")
    else:
        record.end_s = record.end_s or clock()


async def _receive(
    call: Any,
    record: RequestRecord,
    clock: Callable[[], float],
    has_token_counts: bool,
    cancel_after_tokens: int | None,
) -> None:
    """Read responses until the server closes the stream, or until it is time to cancel."""
    while (message := await call.read()) is not grpc.aio.EOF:
        now = clock()
        if message.error_message:
            _fail(record, now, None, message.error_message)
            continue
        record.num_responses += 1
        num_new, is_final, finish_reason = read_response(message.infer_response, has_token_counts)
        if num_new:
            record.chunk_times.append(now)
            record.chunk_tokens.append(num_new)
            record.num_output_tokens += num_new
        if finish_reason is not None:
            record.finish_reason = finish_reason
        if is_final:
            record.is_final = True
            record.end_s = record.end_s or now
        elif cancel_after_tokens is not None and record.num_output_tokens >= cancel_after_tokens:
            call.cancel()
            record.status = Status.CANCELLED
            return
    if record.error is None:
        if record.is_final:
            record.status = Status.OK
        else:
            _fail(record, clock(), None, "the stream ended without a final response")


def read_response(response: Any, has_token_counts: bool) -> tuple[int, bool, str | None]:
    """(new tokens, is it final, finish reason if there is one) of a ModelInferResponse."""
    num_tokens, finish_reason = 0, None
    counted = "num_output_tokens" if has_token_counts else "text_output"
    for index, output in enumerate(response.outputs):
        name = output.name
        if name == counted:
            raw = response.raw_output_contents[index]
            num_tokens = _sum_uint32(raw) if has_token_counts else int(len(raw) > 4)
        elif name == "finish_reason":
            raw = response.raw_output_contents[index]
            if raw and raw != NO_FINISH_REASON:
                finish_reason = raw[4:].decode(errors="replace")
    parameters = response.parameters
    is_final = "triton_final_response" in parameters and parameters["triton_final_response"].bool_param
    return num_tokens, is_final, finish_reason


def read_num_input_tokens(response: Any) -> int | None:
    """`num_input_tokens` of a ModelInferResponse, None if it has none."""
    for index, output in enumerate(response.outputs):
        if output.name == "num_input_tokens":
            return _sum_uint32(response.raw_output_contents[index])
    return None


def _sum_uint32(raw: bytes) -> int:
    return sum(int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4))


def _fail(record: RequestRecord, now: float, code: grpc.StatusCode | None, text: str) -> None:
    record.status = Status.REFUSED if is_refusal(code, text) else Status.ERROR
    record.error = f"{code.name}: {text}" if code is not None else text
    record.end_s = now


def is_refusal(code: grpc.StatusCode | None, text: str) -> bool:
    """Whether the server itself declined for now. gRPC reports a broken connection as UNAVAILABLE too."""
    lowered = text.lower()
    if code is None:
        return any(word in lowered for word in REFUSAL_WORDS)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return True
    return code is grpc.StatusCode.UNAVAILABLE and not any(word in lowered for word in TRANSPORT_WORDS)


def count_input_tokens(url: str, options: WireOptions, prompt: str, timeout_s: float = 60.0) -> int:
    """Tokens the server counts in `prompt`, by a request for one token. Raises grpc.RpcError, ValueError."""
    request = options.request("probe", prompt, 1)
    with grpc.insecure_channel(url) as channel:
        parse = service_pb2.ModelStreamInferResponse.FromString
        call = channel.stream_stream(STREAM_METHOD, None, parse)
        for message in call(_once(request), timeout=timeout_s):
            if message.error_message:
                raise ValueError(message.error_message)
            num_tokens = read_num_input_tokens(message.infer_response)
            if num_tokens is not None:
                return num_tokens
    raise ValueError("the server does not return num_input_tokens")


def why_no_model(url: str, model: str, timeout_s: float = 60.0) -> str | None:
    """The server's reason for not serving `model`, with what it serves instead; None if it serves it, or cannot be
    asked: what is unclear here shows in the first request.
    """
    with grpc.insecure_channel(url) as channel:
        server = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            metadata = server.ModelMetadata(service_pb2.ModelMetadataRequest(name=model), timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                return None
            reason = str(error.details())
        else:
            return _why_no_input([tensor.name for tensor in metadata.inputs])
        try:
            index = server.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True), timeout=timeout_s)
        except grpc.RpcError:
            return reason
        names = sorted({entry.name for entry in index.models})
        return f"{reason}; it serves {', '.join(names) or 'no model'}"


def _why_no_input(inputs: list[str]) -> str | None:
    missing = [name for name in NEEDED_INPUTS if name not in inputs]
    if not missing:
        return None
    taken = ", ".join(inputs) or "no inputs"
    return f"it takes {taken}, and the load test sends {', '.join(missing)}, as llm takes them"


def _once(request: bytes) -> Iterator[bytes]:
    yield request
