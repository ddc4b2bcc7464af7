"""Stands in for the server's `triton_python_backend_utils`, as strict as the real one where a model can go wrong.

It refuses a second final flag, responses after it, unknown flags and wrong tensors as the server does, and records what
on the real server would read freed memory: a question about a request whose final flag is out.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from types import ModuleType
from typing import Any

import numpy as np

from tests.waiting import WAIT_S

FINAL = 1
violations: list[str] = []  # what would have crashed the server or leaked; must stay empty


class TritonModelException(Exception):  # noqa: N818 the server's name
    pass


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError("a tensor needs a NumPy array")
        if array.dtype == np.object_ and not all(isinstance(element, bytes) for element in array.ravel()):
            raise TypeError("string tensors hold bytes")
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] = (), error: TritonError | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error

    def parameters(self) -> str:  # marks a server new enough for numpy 2
        return "{}"


class ResponseSender:
    """One request's line to its client; `responses` is what the client has got."""

    def __init__(self, send_s: float = 0.0) -> None:
        self.responses: list[InferenceResponse] = []
        self.final_count = 0
        self.send_s = send_s
        self.ask_s = 0.0
        self.fails_to_send = False
        self.may_send = threading.Event()  # clear: the client does not read, and a send waits for it
        self.may_send.set()
        self._is_cancelled = False
        self._closed = threading.Event()
        self._sending = threading.Lock()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if flags not in (0, FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and flags == 0:
            raise TritonModelException("Inference Response object must be provided when the response flags is zero.")
        if self._closed.is_set():
            violations.append("a response after the final flag")
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if not self._sending.acquire(blocking=False):
            violations.append("two threads send for one request at once")
            raise TritonModelException("concurrent sends")
        try:
            if self.fails_to_send:
                self.fails_to_send = False
                raise TritonModelException("Failed to increase the shared memory pool size")
            time.sleep(self.send_s)
            self.may_send.wait()
            if response is not None:
                self.responses.append(response)
            if flags == FINAL:
                self.final_count += 1
                self._closed.set()
        finally:
            self._sending.release()

    def is_cancelled(self) -> bool:
        time.sleep(self.ask_s)
        if self._closed.is_set():  # freed before the server had read it
            violations.append("is_cancelled after the final flag")
        return self._is_cancelled

    # ---- the client's side

    @property
    def is_sending(self) -> bool:
        """Whether some thread is inside `send`."""
        return self._sending.locked()

    def cancel(self) -> None:
        self._is_cancelled = True

    def wait(self) -> ResponseSender:
        assert self._closed.wait(WAIT_S), "no final response came"
        return self

    @property
    def text(self) -> str:
        return "".join(text_of(response) for response in self.responses)

    @property
    def error(self) -> tuple[int, str] | None:
        error = self.responses[-1].error
        return None if error is None else (error.code(), error.message())

    def outputs(self, name: str) -> list[Any]:
        return [response.tensors[name][0] for response in self.responses]


def text_of(response: InferenceResponse) -> str:
    return response.tensors["text_output"][0].decode(errors="surrogateescape") if response.error is None else ""


class InferenceRequest:
    def __init__(self, inputs: dict[str, Any], parameters: dict[str, Any] | str = "", send_s: float = 0.0) -> None:
        self.sender = ResponseSender(send_s)
        self._tensors = [Tensor(name, _array(value)) for name, value in inputs.items()]
        self._parameters = parameters if isinstance(parameters, str) else json.dumps(parameters)
        self.timeout_us = 0

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def parameters(self) -> str:
        return self._parameters

    def timeout(self) -> int:
        return self.timeout_us

    def get_response_sender(self) -> ResponseSender:
        return self.sender


def _array(value: Any) -> np.ndarray:
    if isinstance(value, str):
        return np.array([value.encode()], dtype=np.object_)
    if isinstance(value, bool):
        return np.array([value], dtype=np.bool_)
    return np.asarray(value)


class Metric:
    """In the server. A family that ends frees those that were made through it, whoever else holds them (24.10)."""

    def __init__(self, kind: int, buckets: tuple[float, ...] = ()) -> None:
        self.kind, self.value = kind, 0.0
        self.buckets = buckets
        self.observed: list[float] = []
        self.is_freed = False

    def increment(self, amount: float) -> None:
        self._check_memory()
        if self.kind == MetricFamily.COUNTER and amount < 0:
            raise TritonModelException("a counter cannot go down")
        self.value += amount

    def set(self, amount: float) -> None:
        self._check_memory()
        if self.kind == MetricFamily.COUNTER:
            raise TritonModelException("a counter cannot be set")
        self.value = amount

    def observe(self, value: float) -> None:
        self._check_memory()
        if self.kind != MetricFamily.HISTOGRAM:
            raise TritonModelException("only a histogram observes")
        self.observed.append(value)

    def _check_memory(self) -> None:
        if self.is_freed:
            violations.append("a message about a metric that the server has freed")


class MetricFamily:
    """Families and metrics live in the server: the same name and labels give the same metric in every process."""

    COUNTER, GAUGE, HISTOGRAM = range(3)
    exported: dict[tuple[str, tuple[tuple[str, str], ...]], Metric] = {}  # noqa: RUF012

    def __init__(self, name: str, description: str, kind: int) -> None:
        self._name, self._kind = name, kind
        self._made: list[tuple[str, tuple[tuple[str, str], ...]]] = []

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Metric:  # noqa: N802
        if (self._kind == self.HISTOGRAM) != bool(buckets) or sorted(set(buckets or [])) != (buckets or []):
            raise TritonModelException("a histogram needs ascending buckets, and nothing else may have them")
        key = (self._name, tuple(sorted(labels.items())))
        self._made.append(key)
        return self.exported.setdefault(key, Metric(self._kind, tuple(buckets or [])))

    def __del__(self) -> None:
        for key in self._made:
            if key in self.exported:
                self.exported.pop(key).is_freed = True


class ModelConfig:
    """The server's configuration object, with its refusals."""

    def __init__(self, max_batch_size: int = 0) -> None:
        self.config: dict[str, Any] = {"max_batch_size": max_batch_size, "input": [], "output": []}

    def add_input(self, tensor: dict[str, Any]) -> None:
        self._add("input", tensor, {"name", "data_type", "dims", "optional"})

    def add_output(self, tensor: dict[str, Any]) -> None:
        self._add("output", tensor, {"name", "data_type", "dims"})

    def _add(self, kind: str, tensor: dict[str, Any], allowed: set[str]) -> None:
        if not set(tensor) <= allowed or not {"name", "data_type", "dims"} <= set(tensor):
            raise ValueError(f"{kind} {tensor} has wrong properties")
        for known in self.config[kind]:
            if known["name"] == tensor["name"]:
                if (known["data_type"], known["dims"]) != (tensor["data_type"], tensor["dims"]):
                    raise ValueError(f"{kind} {tensor['name']} differs from the configured one")
                return
        self.config[kind].append(tensor)

    def set_max_batch_size(self, size: int) -> None:
        if self.config["max_batch_size"] > size:
            raise ValueError("configuration specified a larger max_batch_size")
        self.config["max_batch_size"] = size

    def set_model_transaction_policy(self, policy: dict[str, Any]) -> None:
        self.config["model_transaction_policy"] = policy


def install() -> None:
    """Make `import triton_python_backend_utils` find this."""
    module = ModuleType("triton_python_backend_utils")
    for value in (TritonModelException, TritonError, Tensor, InferenceResponse, MetricFamily, ModelConfig):
        setattr(module, value.__name__, value)
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL  # type: ignore[attr-defined]
    sys.modules["triton_python_backend_utils"] = module
