"""A server that answers as a script says, for the load test's tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
from load_generator.records import RequestRecord
from load_generator.wire import WireOptions, exchange, open_connections
from tritonclient.grpc import service_pb2, service_pb2_grpc

TOKENS_PER_WORD = 2  # of the scripted server's "tokenizer"; each prompt has 3 tokens more


@dataclass
class Script:
    """What the server does with one request: wait, then send each chunk of tokens, then end."""

    chunks: list[tuple[float, int]] = field(default_factory=lambda: [(0.01, 1)])  # (delay before it in s, tokens)
    error: tuple[grpc.StatusCode, str] | None = None  # instead of the final response
    error_message: str = ""  # the older style: a message on the stream, no code
    has_empty_final: bool = False
    ends_without_final: bool = False


class ScriptedServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Follows `script(index, request)` for each stream, and notes what it received and sent."""

    def __init__(self) -> None:
        self.script: Callable[[int, dict[str, Any]], Script] = lambda index, request: Script()
        self.requests: list[dict[str, Any]] = []
        self.sent_at: dict[str, list[float]] = {}  # request id -> perf_counter of each response with tokens
        self.num_cancelled = 0
        self._index = count()

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for message in requests:
            request = _decode(message)
            self.requests.append(request)
            script = Script() if request["id"] == "probe" else self.script(next(self._index), request)
            try:
                async for response in self._follow(script, request):
                    yield response
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
            if script.error is not None:
                await context.abort(*script.error)

    async def _follow(self, script: Script, request: dict[str, Any]) -> AsyncIterator[Any]:
        sent_at = self.sent_at.setdefault(request["id"], [])
        is_whole = script.error is None and not script.error_message
        for index, (delay, num_tokens) in enumerate(script.chunks):
            await asyncio.sleep(delay)
            is_last = is_whole and index == len(script.chunks) - 1
            is_final = is_last and not script.has_empty_final and not script.ends_without_final
            sent_at.append(time.perf_counter())
            yield _response(request, num_tokens, is_last, is_final)
        if script.error_message:
            yield service_pb2.ModelStreamInferResponse(error_message=script.error_message)
        elif script.has_empty_final and is_whole:
            response = service_pb2.ModelStreamInferResponse()
            response.infer_response.parameters["triton_final_response"].bool_param = True
            yield response


def _decode(message: Any) -> dict[str, Any]:
    values = {
        tensor.name: raw[4:].decode() if tensor.datatype == "BYTES" else bool(raw[0])
        for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    }
    return {"id": message.id, "model": message.model_name, **values, "parameters": message.parameters}


def _response(request: dict[str, Any], num_tokens: int, is_last: bool, is_final: bool) -> Any:
    stream_response = service_pb2.ModelStreamInferResponse()
    response = stream_response.infer_response
    response.id = request["id"]
    response.parameters["triton_final_response"].bool_param = is_final

    def add(name: str, datatype: str, raw: bytes) -> None:
        response.outputs.add(name=name, datatype=datatype, shape=[1])
        response.raw_output_contents.append(raw)

    def text(value: bytes) -> bytes:
        return len(value).to_bytes(4, "little") + value

    add("text_output", "BYTES", text(b"word " * num_tokens))
    if request.get("return_finish_reason"):
        add("finish_reason", "BYTES", text(b"length" if is_last else b"None"))
    if request.get("return_num_output_tokens"):
        add("num_output_tokens", "UINT32", num_tokens.to_bytes(4, "little"))
    if request.get("return_num_input_tokens"):
        num_input = 3 + TOKENS_PER_WORD * len(request["text_input"].split())
        add("num_input_tokens", "UINT32", num_input.to_bytes(4, "little"))
    return stream_response


def send(address: str, wire: WireOptions | None = None, **how: Any) -> RequestRecord:
    """One request straight through `exchange`, on the clock the server's notes are kept in."""
    record = RequestRecord(0, 0, time.perf_counter(), 4, 8)
    request = (wire or WireOptions()).request("0", "a b", 8)

    async def run() -> None:
        async with open_connections(address, 1) as streams:
            await exchange(next(streams), request, record, time.perf_counter, **how)

    asyncio.run(run())
    return record
