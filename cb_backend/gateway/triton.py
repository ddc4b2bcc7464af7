"""The Triton server behind the gateway: which of its models it can ask, and one request's stream of responses.

The protocol's messages are used as `tritonclient` generates them, without its client: a response is read where it
lies, and a process passes on more of them a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cb_backend.gateway.errors import ApiError, from_rpc, from_stream

MODELS_AGE_S = 2.0  # how old the list of models may be
MAX_MESSAGE_BYTES = 1 << 30
MAX_LISTED = 50  # models that an error names
END_S = 5.0  # for the server to end a stream after its last response
_CODED_SINCE = (2, 68)  # server 26.04: earlier ones can crash on the header that asks for codes
_UNKNOWN_MODEL = "Request for unknown model"
# Whether a server that says nothing is still there. No more often: Triton's ends a connection, and all requests on it,
# whose client has asked three times within 300 s each (`--grpc-http2-min-recv-ping-interval-without-data`) while it had
# nothing to say, as in an answer that comes as a whole after a minute.
KEEPALIVE_MS = 310_000
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the server that takes a prompt."""

    name: str
    inputs: frozenset[str]
    outputs: frozenset[str]

    @property
    def takes_chat(self) -> bool:
        return "messages" in self.inputs

    @property
    def tells_tokens(self) -> bool:
        """Whether it says what a prompt is to it instead of answering."""
        return "tokenize" in self.inputs and "tokenized" in self.outputs


@dataclass(slots=True)
class Reply:
    """What one response of the server carries. Lists have an element for each of the n answers."""

    texts: list[str] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)  # "None" while an answer runs
    logprobs: list[str] = field(default_factory=list)  # JSON
    num_input_tokens: int | None = None
    num_output_tokens: list[int] = field(default_factory=list)
    prompt_logprobs: str = ""  # JSON, once a request
    tokenized: str = ""  # JSON about the prompt
    numbers: bytes = b""  # float32 of an embedding, or of scores
    is_final: bool = False


def no_such_model(name: str, known: list[str]) -> ApiError:
    """404 with the names that there are, or the first of them."""
    listed = ", ".join(known[:MAX_LISTED]) or "none"
    more = f", and {len(known) - MAX_LISTED} more" if len(known) > MAX_LISTED else ""
    text = f"the model {name!r} does not exist here; there is: {listed}{more}"
    return ApiError(404, text, param="model", code="model_not_found")


def heard(task: asyncio.Task[Any]) -> None:
    """For `add_done_callback`: a task's failure is no news where whoever waited for it has gone."""
    if not task.cancelled():
        task.exception()


class Triton:
    """One connection to one server, for as many requests at a time as come."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._models: dict[str, Model] = {}
        self._models_at = -MODELS_AGE_S
        self._reading: asyncio.Task[dict[str, Model]] | None = None  # of the list of models
        self._has_codes: bool | None = None

    async def models(self) -> dict[str, Model]:
        """By name, those that are ready and have the tensors. What a model serves, text or numbers, these do not tell.

        Raises `ApiError`.
        """
        if time.monotonic() - self._models_at < MODELS_AGE_S:
            return self._models
        if self._reading is None:  # once for all who want it now; it goes on for the others where one of them leaves
            self._reading = asyncio.create_task(self._read_models())
            self._reading.add_done_callback(self._has_read)
            self._reading.add_done_callback(heard)
        return await asyncio.shield(self._reading)

    def _has_read(self, task: asyncio.Task[dict[str, Model]]) -> None:
        self._reading = None

    async def _read_models(self) -> dict[str, Model]:
        index = await self._call("RepositoryIndex", service_pb2.RepositoryIndexRequest(ready=True))
        found: dict[str, Model] = {}
        for name in dict.fromkeys(entry.name for entry in index.models):
            try:
                answer = await self._call("ModelMetadata", service_pb2.ModelMetadataRequest(name=name))
            except ApiError as error:
                if error.status in (503, 504):
                    raise
                continue  # unloaded meanwhile
            inputs = frozenset(tensor.name for tensor in answer.inputs)
            outputs = frozenset(tensor.name for tensor in answer.outputs)
            if "text_output" in outputs and "sampling_parameters" in inputs:
                found[name] = Model(name, inputs, outputs)
        self._models, self._models_at = found, time.monotonic()
        return found

    async def model(self, name: str) -> Model:
        """Raises `ApiError` 404 with the names that there are."""
        models = await self.models()
        if name not in models:
            raise no_such_model(name, sorted(models))
        return models[name]

    async def is_ready(self) -> bool:
        try:
            return bool((await self._call("ServerReady", service_pb2.ServerReadyRequest())).ready)
        except ApiError:
            return False

    async def stream(self, model: str, inputs: Mapping[str, Any], request_id: str) -> AsyncIterator[Reply]:
        """A request's responses as they come, the final one last. Closing the iterator cancels the request.

        `inputs`: text, flag or token ids by the name of the tensor. Raises `ApiError`.
        """
        metadata = (("triton_grpc_error", "true"),) if await self._tells_codes() else None
        call = self._connected().ModelStreamInfer(metadata=metadata)
        try:
            await call.write(make_request(model, inputs, request_id))
            await call.done_writing()
            is_final = False
            while not is_final:
                message = await call.read()
                if message is grpc.aio.EOF:
                    raise await _end_of(call, self.url)
                if message.error_message:
                    await _read_end(call)
                    raise await self._failed(model, message.error_message)
                reply = read_reply(message.infer_response)
                is_final = reply.is_final
                yield reply
            await _read_end(call)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.url) from None
        finally:
            call.cancel()

    async def ask(self, model: str, inputs: Mapping[str, Any], request_id: str) -> Reply:
        """A request's one response. Raises `ApiError`."""
        stream = self.stream(model, inputs, request_id)
        try:
            found = [reply async for reply in stream if reply.texts or reply.numbers or not reply.is_final]
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator
        if len(found) != 1:
            raise ApiError(502, f"the model {model!r} gave {len(found)} responses instead of one")
        return found[0]

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _failed(self, model: str, text: str) -> ApiError:
        """What a response without outputs says. A model may have been unloaded since the list was read."""
        if not text.startswith(_UNKNOWN_MODEL):
            return from_stream(text)
        self._models_at = -MODELS_AGE_S
        known = await self.models()
        return no_such_model(model, sorted(name for name in known if name != model))

    async def _tells_codes(self) -> bool:
        if self._has_codes is None:
            version = (await self._call("ServerMetadata", service_pb2.ServerMetadataRequest())).version
            self._has_codes = _numbers(version) >= _CODED_SINCE
        return self._has_codes

    async def _call(self, name: str, request: Any) -> Any:
        try:
            return await getattr(self._connected(), name)(request, timeout=10.0)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.url) from None

    def _connected(self) -> Any:
        """The connection. Made here because it belongs to the loop that is running."""
        if self._stub is None:
            self._channel = grpc.aio.insecure_channel(self.url, options=_OPTIONS)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._stub


async def _read_end(call: Any) -> None:
    """Of a stream whose last response has come. A server of 24.10 keeps the model of a stream that is cancelled just as
    it ends, so what is over is not cancelled."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(call.read(), END_S)


async def _end_of(call: Any, url: str) -> ApiError:
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.OK:
        return ApiError(502, f"the server at {url} ended the answer before its last response")
    return from_rpc(grpc.aio.AioRpcError(code, None, None, details=details), url)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def make_request(model: str, inputs: Mapping[str, Any], request_id: str) -> Any:
    """The protocol's message. Texts and lists of them become BYTES, flags BOOL, lists of token ids INT32."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in inputs.items():
        tensor = request.inputs.add(name=name)
        if isinstance(value, bool):
            tensor.datatype, data = "BOOL", struct.pack("?", value)
        elif isinstance(value, str):
            text = value.encode()
            tensor.datatype, data = "BYTES", struct.pack("<I", len(text)) + text
        elif value and isinstance(value[0], str):
            texts = [text.encode() for text in value]
            tensor.datatype, data = "BYTES", b"".join(struct.pack("<I", len(text)) + text for text in texts)
        else:
            tensor.datatype, data = "INT32", struct.pack(f"<{len(value)}i", *value)
        tensor.shape.append(len(value) if isinstance(value, list) else 1)
        request.raw_input_contents.append(data)
    return request


def read_reply(response: Any) -> Reply:
    """Of a `ModelInferResponse`; outputs that the gateway does not know are left out."""
    reply = Reply()
    final = response.parameters.get("triton_final_response")
    reply.is_final = final is not None and final.bool_param
    for tensor, data in zip(response.outputs, response.raw_output_contents, strict=False):
        if tensor.name == "text_output":
            reply.texts = _texts(data)
        elif tensor.name == "finish_reason":
            reply.finish_reasons = _texts(data)
        elif tensor.name == "tokenized":
            reply.tokenized = _texts(data)[0]
        elif tensor.name == "logprobs":
            reply.logprobs = _texts(data)
        elif tensor.name == "prompt_logprobs":
            reply.prompt_logprobs = _texts(data)[0]
        elif tensor.name in ("embedding", "scores"):
            reply.numbers = data
        elif tensor.name == "num_output_tokens":
            reply.num_output_tokens = list(struct.unpack(f"<{len(data) // 4}I", data))
        elif tensor.name == "num_input_tokens":
            reply.num_input_tokens = struct.unpack_from("<I", data)[0]
    return reply


def _texts(data: bytes) -> list[str]:
    """Elements of a BYTES tensor: four bytes of length, then so many bytes, each."""
    texts, position = [], 0
    while position < len(data):
        (length,) = struct.unpack_from("<I", data, position)
        position += 4
        texts.append(data[position : position + length].decode("utf-8", errors="replace"))
        position += length
    return texts
