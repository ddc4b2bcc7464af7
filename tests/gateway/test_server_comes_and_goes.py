"""A gateway outlives what is behind it: models that are unloaded, a server that is killed and started again."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
import tritonclient.grpc as triton

from cb_backend.cli.server.server_process import free_ports
from cb_backend.gateway.triton import KEEPALIVE_MS, MODELS_AGE_S
from tests.fakes.triton_server import FakeTriton
from tests.gateway.conftest import running_gateway
from tests.server.conftest import running_server
from tests.server.tiny_checkpoint import write_tiny_checkpoint
from tests.waiting import eventually

BODY = {"model": "llm", "prompt": "the quick brown fox", "max_tokens": 3}


def ask(address: str, **more: object) -> httpx.Response:
    return httpx.post(f"{address}/v1/completions", json={**BODY, **more}, timeout=60)


@pytest.mark.server
def test_a_model_that_is_unloaded_is_not_found_from_the_first_request_on(tmp_path: Path) -> None:
    """The list of models may be some seconds old: then the server refuses, and its words become the same answer."""
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    (tmp_path / "models").mkdir()
    explicit = ("--model-control-mode=explicit", "--load-model=llm")
    with (
        running_server(checkpoint, tmp_path / "models", front_ends=1, server_arguments=explicit) as server,
        running_gateway(server.url) as address,
        triton.InferenceServerClient(server.url) as control,
    ):
        for _ in range(2):
            assert ask(address).status_code == 200
            control.unload_model("llm")
            for is_stream in (False, True, False):
                answer = ask(address, stream=is_stream)
                assert answer.status_code == 404, answer.text
                assert answer.json()["error"]["code"] == "model_not_found"
                assert "'llm' does not exist here" in answer.json()["error"]["message"]
            time.sleep(MODELS_AGE_S)
            assert httpx.get(f"{address}/v1/models").json()["data"] == []
            control.load_model("llm")
            eventually(lambda: ask(address).status_code == 200, "the model answers again")


def test_a_server_that_is_started_again_is_found(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    server = FakeTriton()
    with running_gateway(server.start(port)) as address:
        for _ in range(2):
            assert ask(address).status_code == 200
            server.stop()
            answer = ask(address)
            assert answer.status_code == 503
            assert "retry-after" in answer.headers
            assert f"no Triton server answers at 127.0.0.1:{port}" in answer.json()["error"]["message"]
            assert httpx.get(f"{address}/health").status_code == 503
            server = FakeTriton()
            server.start(port)
            eventually(lambda: ask(address).status_code == 200, "the server answers again")
        server.stop()


def test_no_server_is_asked_for_signs_of_life_more_often_than_it_bears() -> None:
    """Of `tritonserver --help`; what happens otherwise is the next test's."""
    assert KEEPALIVE_MS > 300_000


@pytest.mark.long
def test_an_answer_that_takes_minutes_comes() -> None:
    server = FakeTriton()
    server.pause_s = 110.0
    with running_gateway(server.start()) as address:
        answer = httpx.post(f"{address}/v1/completions", json={**BODY, "max_tokens": 1}, timeout=150)
        assert answer.status_code == 200, answer.text
        server.stop()


def test_a_server_that_dies_in_the_middle_ends_streams_with_an_error() -> None:
    server = FakeTriton()
    server.pause_s = 0.05
    with running_gateway(server.start()) as address:
        body = {**BODY, "max_tokens": 10_000, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert next(lines).startswith('data: {"id"')
            server.stop()
            *_, told, end = lines
        assert '"error"' in told
        assert '"type":"server_error"' in told
        assert end == "data: [DONE]"
