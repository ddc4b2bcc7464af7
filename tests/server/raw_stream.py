"""One request on a gRPC stream of its own, with nothing hidden: every response and every error as it arrived."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

from tests.waiting import WAIT_S


class RawStream:
    """Opens the stream and sends the request at once."""

    def __init__(
        self,
        url: str,
        prompt: bytes | str,
        sampling: dict[str, Any] | str | None,
        stream: bool = True,
        num_to_read: int | None = None,
    ) -> None:
        """`num_to_read`: after so many responses it takes nothing more from the connection, until `read_on`: its
        windows fill up, and the rest stays at the server."""
        self.events: list[tuple[float, Any, Any]] = []  # (time.monotonic(), result, error)
        self._num_to_read = num_to_read
        self._arrived = threading.Condition()
        self._may_read = threading.Event()
        self._may_read.set()
        self._connection = grpc.InferenceServerClient(url)
        self._connection.start_stream(self._on_event)
        text = prompt.encode() if isinstance(prompt, str) else prompt
        inputs = [_tensor("text_input", "BYTES", text), _tensor("stream", "BOOL", stream)]
        inputs += [_tensor("exclude_input_in_output", "BOOL", True), _tensor("return_finish_reason", "BOOL", True)]
        if sampling is not None:
            body = sampling if isinstance(sampling, str) else json.dumps(sampling)
            inputs.append(_tensor("sampling_parameters", "BYTES", body.encode()))
        self._connection.async_stream_infer("llm", inputs, enable_empty_final_response=True)

    def read_on(self) -> None:
        self._may_read.set()

    @property
    def text(self) -> str:
        """Everything received so far, joined: a piece must be valid UTF-8 by itself."""
        pieces = [result.as_numpy("text_output") for _, result, error in self.events if error is None]
        return "".join(piece.reshape(-1)[0].decode() for piece in pieces if piece is not None and piece.size)

    @property
    def errors(self) -> list[str]:
        return [error.message() for _, _, error in self.events if error is not None]

    @property
    def num_finals(self) -> int:
        """Final responses; an error on the stream ends its request."""
        return sum(
            error is not None or result.get_response().parameters["triton_final_response"].bool_param
            for _, result, error in list(self.events)
        )

    @property
    def num_texts(self) -> int:
        return sum(error is None for _, _, error in list(self.events))

    @property
    def finish_reasons(self) -> list[str]:
        arrays = [result.as_numpy("finish_reason") for _, result, error in self.events if error is None]
        return [array.reshape(-1)[0].decode() for array in arrays if array is not None and array.size]

    def wait(self, num_texts: int | None = None, timeout: float = WAIT_S) -> RawStream:
        """Until this many responses with text have come, or (None) the final one. Fails after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._arrived:
            while self.num_finals == 0 and (num_texts is None or self.num_texts < num_texts):
                left = deadline - time.monotonic()
                assert left > 0, f"only {len(self.events)} responses within {timeout} s"
                self._arrived.wait(left)
        return self

    def close(self, cancel: bool = False) -> None:
        """Without `cancel` this waits until the server has ended the stream, so late responses are seen."""
        if cancel and not self._may_read.is_set():
            threading.Timer(0.2, self.read_on).start()  # by then it is cancelled; the library waits for its reader
        self._connection.stop_stream(cancel_requests=cancel)
        self._connection.close()

    def _on_event(self, result: Any, error: Any) -> None:
        self._may_read.wait()
        with self._arrived:
            self.events.append((time.monotonic(), result, error))
            if len(self.events) == self._num_to_read:
                self._may_read.clear()
            self._arrived.notify_all()


def _tensor(name: str, datatype: str, value: Any) -> grpc.InferInput:
    tensor = grpc.InferInput(name, [1], datatype)
    tensor.set_data_from_numpy(np.array([value], dtype=bool if datatype == "BOOL" else object))
    return tensor
