"""A server of Triton's gRPC protocol without an engine: answers of known tokens, as fast as they are taken.

In the process of a test (`fake_triton`), or in one of its own for what is measured:

    python -m tests.fakes.triton_server PORT
"""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

SERVICE = "inference.GRPCInferenceService"
INPUTS = ("text_input", "messages", "input_ids", "stream", "sampling_parameters", "tokenize")
OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens", "tokenized")
TOKEN = " word"
NUM_INPUT_TOKENS = 7
ABOUT = {"tokens": [1], "count": 1, "max_model_len": 4096, "tool_calls": "hermes", "reasoning": "think"}


class FakeTriton:
    """`asked`: the inputs of every request; `num_open`: streams that have not ended; `pause_s` before each token.

    An answer has `max_tokens` of the request's parameters, or `answer` where it is set.
    """

    def __init__(self, models: tuple[str, ...] = ("llm",), num_workers: int = 64) -> None:
        self.models = models
        self.asked: list[dict[str, Any]] = []
        self.num_open = self.num_cancelled = 0
        self.pause_s = 0.0
        self.answer: list[str] | None = None
        self.error = ""
        self._lock = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(num_workers))
        unary = {
            "ServerReady": (
                service_pb2.ServerReadyRequest,
                lambda request: service_pb2.ServerReadyResponse(ready=True),
            ),
            "ServerMetadata": (
                service_pb2.ServerMetadataRequest,
                lambda request: service_pb2.ServerMetadataResponse(name="triton", version="2.51.0"),
            ),
            "RepositoryIndex": (service_pb2.RepositoryIndexRequest, self._index),
            "ModelMetadata": (service_pb2.ModelMetadataRequest, self._metadata),
        }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                lambda request, context, answer=answer: answer(request), kind.FromString, _serialize
            )
            for name, (kind, answer) in unary.items()
        }
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream, service_pb2.ModelInferRequest.FromString, _serialize
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def start(self, port: int = 0) -> str:
        """Its address."""
        port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()
        return f"127.0.0.1:{port}"

    def stop(self) -> None:
        self._server.stop(grace=None).wait()

    def _index(self, request: Any) -> Any:
        entries = [{"name": name, "version": "1", "state": "READY"} for name in self.models]
        return service_pb2.RepositoryIndexResponse(models=entries)

    def _metadata(self, request: Any) -> Any:
        return service_pb2.ModelMetadataResponse(
            name=request.name, inputs=[{"name": name} for name in INPUTS], outputs=[{"name": name} for name in OUTPUTS]
        )

    def _stream(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            inputs = _inputs(request)
            with self._lock:
                self.num_open += 1
                self.asked.append(inputs)
            context.add_callback(self._note_end(context))
            yield from self._answer(inputs, context)

    def _note_end(self, context: grpc.ServicerContext) -> Any:
        def note() -> None:
            with self._lock:
                self.num_open -= 1
                self.num_cancelled += context.code() is None and not getattr(context, "is_answered", False)

        return note

    def _answer(self, inputs: dict[str, Any], context: Any) -> Iterator[bytes]:
        if self.error:
            yield service_pb2.ModelStreamInferResponse(error_message=self.error).SerializeToString()
            return
        if "tokenize" in inputs:
            yield response("text", "stop", is_final=True, tokenized=json.dumps(ABOUT))
            context.is_answered = True
            return
        sampling = json.loads(inputs.get("sampling_parameters") or "{}")
        pieces = self.answer if self.answer is not None else [TOKEN] * min(sampling.get("max_tokens", 16), 100_000)
        if not inputs.get("stream"):
            pieces = ["".join(pieces)]
        has_counts = bool(inputs.get("return_num_output_tokens"))
        middle = response(TOKEN, "None", has_counts=has_counts)
        for index, piece in enumerate(pieces):
            if self.pause_s:
                time.sleep(self.pause_s)
            if not context.is_active():
                return
            if index == len(pieces) - 1:
                yield response(piece, "length", is_final=True, has_counts=has_counts)
            else:
                yield middle if piece == TOKEN else response(piece, "None", has_counts=has_counts)
        context.is_answered = True


def response(
    text: str, reason: str, *, is_final: bool = False, has_counts: bool = False, tokenized: str | None = None
) -> bytes:
    """One response, serialised, as the real server writes it: outputs beside their raw contents."""
    infer = service_pb2.ModelInferResponse(model_name="llm", model_version="1")
    infer.parameters["triton_final_response"].bool_param = is_final
    outputs: dict[str, tuple[str, bytes]] = {
        "text_output": ("BYTES", _text(text)),
        "finish_reason": ("BYTES", _text(reason)),
    }
    if has_counts:
        outputs["num_input_tokens"] = ("UINT32", struct.pack("<I", NUM_INPUT_TOKENS))
        outputs["num_output_tokens"] = ("UINT32", struct.pack("<I", 1))
    if tokenized is not None:
        outputs["tokenized"] = ("BYTES", _text(tokenized))
    for name, (datatype, data) in outputs.items():
        infer.outputs.add(name=name, datatype=datatype, shape=[1])
        infer.raw_output_contents.append(data)
    return bytes(service_pb2.ModelStreamInferResponse(infer_response=infer).SerializeToString())


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _inputs(request: Any) -> dict[str, Any]:
    """Texts and flags by the tensor's name."""
    values: dict[str, Any] = {}
    for tensor, data in zip(request.inputs, request.raw_input_contents, strict=True):
        values[tensor.name] = data[4:].decode() if tensor.datatype == "BYTES" else bool(data[0])
    return values


def _serialize(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


@contextlib.contextmanager
def fake_triton(**options: Any) -> Iterator[tuple[FakeTriton, str]]:
    """A server and its address."""
    server = FakeTriton(**options)
    address = server.start()
    try:
        yield server, address
    finally:
        server.stop()


if __name__ == "__main__":
    print(FakeTriton().start(int(sys.argv[1])), flush=True)
    threading.Event().wait()
