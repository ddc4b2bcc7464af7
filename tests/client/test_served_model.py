"""A load for a model that cannot take it: pytest tests/client/test_served_model.py"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.client.test_load_test import load_test

PROBED = "the model was asked for a token"
TENSORS = {"llm": ["text_input", "stream", "sampling_parameters", "messages"], "mood": ["text"], "none": []}


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers what a server says of its models, and notes who is asked for tokens."""

    def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        response = service_pb2.ModelMetadataResponse(name=request.name)
        for name in TENSORS[request.name]:
            response.inputs.add(name=name)
        return response

    def ModelStreamInfer(self, requests: Any, context: Any) -> Any:  # noqa: N802
        context.abort(grpc.StatusCode.UNAVAILABLE, PROBED)


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Server(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0.1).wait()


def error_of(address: str, capsys: Any, *options: str) -> str:
    """What the command says, which must be one line, and nothing but it."""
    assert load_test.main(["--url", address, "--rate", "1", "--num-requests", "20", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return str(said.err)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mood", "it takes text, and the load test sends text_input, stream, sampling_parameters, as llm takes them"),
        ("none", "it takes no inputs, and the load test sends text_input"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--tokens-per-word", "1.5"]])  # with the probe that learns words, and without
def test_h12_neighbours_a_model_with_other_tensors(
    name: str, said: str, options: list[str], address: str, capsys: Any
) -> None:
    error = error_of(address, capsys, "--model", name, *options)
    assert said in error
    assert repr(name) in error


def test_h12_a_model_with_these_tensors_is_sent_its_load(address: str, capsys: Any) -> None:
    assert PROBED in error_of(address, capsys, "--model", "llm")
