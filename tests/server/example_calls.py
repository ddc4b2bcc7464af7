"""The examples of model_repository/ in a repository of a test, and requests to them, each on a stream of its own."""

from __future__ import annotations

import queue
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

from cb_backend.cli.paths import checkout_path
from tests.server.conftest import RunningServer
from tests.waiting import WAIT_S


def add_examples(repository: Path) -> None:
    for folder in checkout_path("model_repository").iterdir():
        if (folder / "config.pbtxt").is_file() and folder.name != "llm":
            shutil.copytree(folder, repository / folder.name, ignore=shutil.ignore_patterns("__pycache__"))


class Call:
    """One request on a stream of its own. Inputs: text, bools, or arrays; `shape` of all of them."""

    def __init__(self, server: RunningServer, model: str, shape: tuple[int, ...] = (1,), **inputs: Any) -> None:
        self.arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.connection = grpc.InferenceServerClient(server.url)
        self.connection.start_stream(lambda result, error: self.arrived.put((result, error)))
        tensors = [_input(name, value, shape) for name, value in inputs.items()]
        self.connection.async_stream_infer(model, tensors, enable_empty_final_response=True)

    def next(self) -> tuple[dict[str, list[Any]], bool]:
        """Outputs of the next response, and whether it is the final one. Raises the request's error."""
        result, error = self.arrived.get(timeout=WAIT_S)
        if error is not None:
            self.close()
            raise error
        message = result.get_response()
        outputs = {output.name: _decoded(result.as_numpy(output.name)) for output in message.outputs}
        return outputs, message.parameters["triton_final_response"].bool_param

    def all(self) -> list[dict[str, list[Any]]]:
        """Every response that holds something."""
        responses, is_final = [], False
        while not is_final:
            outputs, is_final = self.next()
            responses += [outputs] if outputs else []
        self.close()
        return responses

    def close(self, cancel: bool = False) -> None:
        self.connection.stop_stream(cancel_requests=cancel)
        self.connection.close()


def _input(name: str, value: Any, shape: tuple[int, ...]) -> grpc.InferInput:
    if isinstance(value, str):
        value = np.array([value.encode()], dtype=np.object_).reshape(shape)
    elif isinstance(value, bool):
        value = np.array([value]).reshape(shape)
    types = {"O": "BYTES", "b": "BOOL", "i": "INT32", "u": "UINT64", "f": "FP32"}
    tensor = grpc.InferInput(name, list(value.shape), types[value.dtype.kind])
    tensor.set_data_from_numpy(value)
    return tensor


def _decoded(array: Any) -> list[Any]:
    return [value.decode() if isinstance(value, bytes) else value for value in array.reshape(-1).tolist()]


def joined(responses: list[dict[str, list[Any]]]) -> str:
    return "".join(response["text_output"][0] for response in responses if "text_output" in response)
