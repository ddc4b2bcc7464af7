"""A client for the served model over gRPC: stream or collect text, cancel, get errors as exceptions.

One file over `tritonclient[grpc]`, to use or to copy; it imports nothing of the server's side. Every request has a
stream of its own, because in this protocol cancelling a stream cancels all the requests on it.

    client = Client("localhost:8001")
    print(client.chat("What is the capital of France?", max_tokens=32, temperature=0))
    for text in client.stream([{"role": "user", "content": "Tell me a story."}], max_tokens=128):
        print(text, end="", flush=True)
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

# A text goes to the model as it is; chat messages ({"role", "content"} each) through the checkpoint's chat template. An
# object has them under "messages", and beside them arguments of the template ("tools", ...).
Prompt = str | list[dict[str, Any]] | dict[str, Any]

_Event = tuple[Any, Any, float]  # result, error, time of arrival


class ClientError(Exception):
    """The server refused or could not finish a request. The text is the server's own."""


class ServerUnreachableError(ClientError):
    """Nobody answers at this address."""


@dataclass(frozen=True)
class Response:
    """One response of the server. When streaming, `text` is what is new."""

    text: str
    received_at: float  # time.perf_counter() of its arrival
    is_final: bool
    finish_reason: str | None = None  # "stop" or "length" on the last response with text
    num_input_tokens: int = 0
    num_output_tokens: int = 0  # tokens in this response


class Client:
    """Requests to one model of one server. Methods may be called from several threads at once."""

    def __init__(self, url: str = "localhost:8001", model: str = "llm", timeout: float | None = None) -> None:
        """`timeout`: seconds without any response after which a request is given up; None waits for ever."""
        self.url = url
        self.model = model
        self._timeout = timeout

    def is_ready(self) -> bool:
        """Whether a server answers and has loaded the model."""
        try:
            with grpc.InferenceServerClient(self.url) as connection:
                return bool(connection.is_model_ready(self.model))
        except InferenceServerException:
            return False

    def chat(self, messages: Prompt, **sampling: Any) -> str:
        """The whole answer to chat messages; a text is one message of a user. Raises `ClientError`.

        For an answer that is streamed, give the messages to `stream`.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.generate(messages, **sampling)

    def stream(self, prompt: Prompt, **sampling: Any) -> Generator[str, None, None]:
        """Pieces of text as they are generated; joined they are the answer. Closing the iterator cancels the request.

        `prompt`: a text, or chat messages. `sampling`: max_tokens, temperature, top_p, top_k, seed, stop, ... as the
        server documents them. Raises `ClientError`.
        """
        for response in self.responses(prompt, is_streaming=True, **sampling):
            if response.text:
                yield response.text

    def generate(self, prompt: Prompt, **sampling: Any) -> str:
        """The whole answer, without the prompt. Raises `ClientError`."""
        return "".join(response.text for response in self.responses(prompt, is_streaming=False, **sampling))

    def generate_all(self, prompts: Iterable[Prompt], **sampling: Any) -> list[str]:
        """Answers to several prompts that are sent at the same time, in their order. Raises the first `ClientError`."""
        prompts = list(prompts)
        with ThreadPoolExecutor(max_workers=max(1, len(prompts))) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **sampling), prompts))

    def responses(self, prompt: Prompt, *, is_streaming: bool, **sampling: Any) -> Generator[Response, None, None]:
        """Every response of one request, the final one last. Closing the iterator cancels the request."""
        arrived: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        connection = grpc.InferenceServerClient(self.url)
        is_complete = False
        try:
            connection.start_stream(lambda result, error: arrived.put((result, error, time.perf_counter())))
            connection.async_stream_infer(
                self.model, _inputs(prompt, is_streaming, sampling), enable_empty_final_response=True
            )
            while not is_complete:
                response = _parse(*self._next(arrived))
                is_complete = response.is_final
                yield response
        except InferenceServerException as error:
            is_complete = True
            # A broken stream refuses the request with a general text; what broke it came through the callback.
            cause = next((event[1] for event in _drain(arrived) if event[1] is not None), error)
            raise _client_error(cause, self.url) from None
        finally:
            # cancel_requests is what tells the server; without it the stream would wait for the end of the answer.
            connection.stop_stream(cancel_requests=not is_complete)
            connection.close()

    def _next(self, arrived: queue.SimpleQueue[_Event]) -> tuple[Any, float]:
        try:
            result, error, received_at = arrived.get(timeout=self._timeout)
        except queue.Empty:
            raise ClientError(
                f"no response from {self.url} for {self._timeout:g} s; the request is cancelled"
            ) from None
        if error is not None:
            raise error
        return result, received_at


def _inputs(prompt: Prompt, is_streaming: bool, sampling: dict[str, Any]) -> list[grpc.InferInput]:
    name, text = ("text_input", prompt) if isinstance(prompt, str) else ("messages", json.dumps(prompt))
    inputs = [
        _input(name, "BYTES", [text.encode()]),
        _input("stream", "BOOL", [is_streaming]),
        _input("exclude_input_in_output", "BOOL", [True]),
        _input("sampling_parameters", "BYTES", [json.dumps(sampling).encode()]),
    ]
    flags = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
    return inputs + [_input(name, "BOOL", [True]) for name in flags]


def _input(name: str, datatype: str, values: list[Any]) -> grpc.InferInput:
    tensor = grpc.InferInput(name, [len(values)], datatype)
    tensor.set_data_from_numpy(np.array(values, dtype=bool if datatype == "BOOL" else object))
    return tensor


def _parse(result: grpc.InferResult, received_at: float) -> Response:
    is_final = result.get_response().parameters["triton_final_response"].bool_param
    text = _first(result, "text_output", b"")
    finish_reason = _first(result, "finish_reason", b"None").decode()
    return Response(
        text=text.decode(),
        received_at=received_at,
        is_final=is_final,
        finish_reason=None if finish_reason == "None" else finish_reason,
        num_input_tokens=int(_first(result, "num_input_tokens", 0)),
        num_output_tokens=int(_first(result, "num_output_tokens", 0)),
    )


def _first(result: grpc.InferResult, name: str, default: Any) -> Any:
    array = result.as_numpy(name)
    return default if array is None or array.size == 0 else array.reshape(-1)[0]


def _drain(arrived: queue.SimpleQueue[_Event]) -> Iterator[_Event]:
    while not arrived.empty():
        yield arrived.get_nowait()


def _client_error(error: InferenceServerException, url: str) -> ClientError:
    # Errors of the model carry no status on a stream; this one is the connection's.
    if error.status() == "StatusCode.UNAVAILABLE":
        return ServerUnreachableError(f"no server answers at {url} ({error.message()}); start one or give its address")
    return ClientError(error.message() or str(error))
