"""The part of Triton's in-process API (module `tritonserver`) that its OpenAI frontend uses, over gRPC to a server.

The frontend builds requests and reads responses with this API, whose own module exists in NVIDIA's image only. Here a
request's tensors go out, and a response's raw bytes come back, through tritonclient; nothing else is added or changed.
"""

from __future__ import annotations

import ctypes
import enum
import sys
import types
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import np_to_triton_dtype

DataType = enum.Enum("DataType", ["BOOL", "BYTES", "FP32", "INT32", "INT64", "UINT32", "UINT64"])


class Tensor:
    """One output. `data_ptr` and `size` (bytes) are of its serialised form, as the frontend reads it."""

    def __init__(self, datatype: str, shape: tuple[int, ...], raw: bytes) -> None:
        self.data_type = DataType[datatype]
        self.shape = shape
        self.size = len(raw)
        self._buffer = ctypes.create_string_buffer(raw, len(raw))
        self.data_ptr = ctypes.addressof(self._buffer)


@dataclass
class InferenceResponse:
    outputs: dict[str, Tensor]
    final: bool


@dataclass
class InferenceRequest:
    model: Model
    inputs: dict[str, Any]


@dataclass
class Model:
    """A served model. `sent` keeps the names of the tensors of every request, for a look at what was sent."""

    url: str
    name: str
    version: int = 1
    sent: list[list[str]] = field(default_factory=list)

    def config(self) -> dict[str, Any]:
        with grpc.InferenceServerClient(self.url) as connection:
            config = connection.get_model_config(self.name, as_json=True)["config"]
        return {"backend": "", "platform": "", **config}

    def create_request(self, inputs: dict[str, Any]) -> InferenceRequest:
        return InferenceRequest(self, inputs)

    async def async_infer(self, request: InferenceRequest) -> AsyncIterator[InferenceResponse]:
        """Responses, the final one last. Raises the server's error."""
        self.sent.append(sorted(request.inputs))
        tensors = [_input(name, value) for name, value in request.inputs.items()]

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": self.name, "inputs": tensors, "enable_empty_final_response": True}

        async with grpc_aio.InferenceServerClient(self.url) as connection:
            async for result, error in connection.stream_infer(requests()):
                if error is not None:
                    raise error
                yield _response(result)


class Server:
    """What the frontend asks its server: which models there are, and where."""

    def __init__(self, url: str, names: list[str], repository: Path) -> None:
        self._models = {name: Model(url, name) for name in names}
        self.options = types.SimpleNamespace(model_repository=str(repository))

    def models(self, exclude_not_ready: bool = False) -> dict[tuple[str, int], Model]:
        return {(name, model.version): model for name, model in self._models.items()}

    def model(self, name: str) -> Model:
        return self._models[name]


def install() -> None:
    """Make `import tritonserver` find this, also under the names that annotations use."""
    module: Any = types.ModuleType("tritonserver")
    module.DataType, module.Tensor, module.Model, module.Server = DataType, Tensor, Model, Server
    module.InferenceResponse = InferenceResponse
    response = types.SimpleNamespace(InferenceResponse=InferenceResponse)
    module._api = types.SimpleNamespace(_response=response)
    sys.modules["tritonserver"] = module


def _input(name: str, value: Any) -> grpc.InferInput:
    """Arrays as they are; lists are of text, as the API takes them."""
    array = value if isinstance(value, np.ndarray) else np.array(value, dtype=object)
    tensor = grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def _response(result: grpc.InferResult) -> InferenceResponse:
    message = result.get_response()
    pairs = zip(message.outputs, message.raw_output_contents, strict=True)
    outputs = {output.name: Tensor(output.datatype, tuple(output.shape), raw) for output, raw in pairs}
    return InferenceResponse(outputs, message.parameters["triton_final_response"].bool_param)
