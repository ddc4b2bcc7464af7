"""A model that is replaced under its name, and one whose front end was killed: unload and load bring it back.

pytest tests/server/test_reload.py
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from tritonclient.grpc import service_pb2

from tests.faults.traffic import LONG_TOKENS, STREAM_METHOD, message
from tests.server.conftest import RunningServer, marked_processes, running_server
from tests.server.raw_stream import RawStream
from tests.server.test_faults import _stubs
from tests.server.tiny_checkpoint import Reference
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.server

PROMPT = "the quick brown fox jumps over the lazy dog while seven wizards make toxic brew for the evil queen " * 2


@pytest.fixture(scope="module")
def own_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("own") / "checkpoint"))


@pytest.fixture(scope="module")
def by_hand(own_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose models are loaded and unloaded by its clients."""
    options: dict[str, Any] = {"front_ends": 1, "exit_timeout_secs": 120}
    options["server_arguments"] = ("--model-control-mode=explicit", "--load-model=llm")
    with running_server(own_checkpoint, tmp_path_factory.mktemp("by_hand"), **options) as server:
        yield server
        # The requests of the killed front end never end, and an orderly stop would wait for them all its time.
        os.kill(server.process.pid, signal.SIGKILL)
        eventually(lambda: marked_processes(server.mark) == [], "front end and engine end by themselves")


def change(server: RunningServer, verb: str) -> None:
    status, text = server.post(f"/v2/repository/models/llm/{verb}", {})
    assert status == 200, text


def answer(server: RunningServer) -> str:
    stream = RawStream(server.url, PROMPT, {"max_tokens": 24, "temperature": 0}).wait()
    stream.close()
    assert stream.errors == []
    return stream.text


def test_m3_a_model_replaced_under_its_name_reuses_nothing(
    by_hand: RunningServer, own_checkpoint: Path, reference: Reference
) -> None:
    """Case M3, of whole models: what runs ends on the old weights, and what comes later gets the new ones' answer."""
    expected = reference.greedy_text(PROMPT, 24)
    assert [answer(by_hand), answer(by_hand)] == [expected, expected]
    num_cached = lambda: by_hand.gauge("cb_cached_prompt_tokens_total", "llm") or 0.0  # noqa: E731
    eventually(lambda: num_cached() > 0, "it was cached")
    running = RawStream(by_hand.url, "fox", {"max_tokens": 24, "temperature": 0})
    running.wait(num_texts=1)
    change(by_hand, "unload")
    running.wait().close()
    assert running.errors == []
    assert running.text == reference.greedy_text("fox", 24)
    eventually(lambda: by_hand.engine_pids() == [], "the engine has ended with its model")

    other = Reference(own_checkpoint)
    torch.manual_seed(21)
    other.model.lm_head.weight.data.normal_(std=0.3)
    other.model.save_pretrained(own_checkpoint)
    before = num_cached()
    change(by_hand, "load")
    assert other.greedy_text(PROMPT, 24) != expected
    assert answer(by_hand) == other.greedy_text(PROMPT, 24)
    by_hand.wait_idle()
    assert num_cached() == before


@pytest.mark.race  # killed while it holds the lock of the shared memory, it takes a server of 24.10 with it: one in six
def test_v4_a_killed_front_end_is_an_error_for_each_client_and_comes_back_by_reloading(by_hand: RunningServer) -> None:
    """Case V4: nobody waits longer than he meant to, the next one is told at once, no shared memory is left."""
    (stub,) = _stubs(by_hand)
    maps = Path(f"/proc/{stub}/maps").read_text()
    shared_memory = [entry for entry in Path("/dev/shm").iterdir() if str(entry) in maps]
    assert len(shared_memory) == 1
    before = answer(by_hand)
    parse = service_pb2.ModelStreamInferResponse.FromString
    request = message("long", {"max_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True})
    with grpc.insecure_channel(by_hand.url) as channel, ThreadPoolExecutor(20) as pool:
        open_call = channel.stream_stream(STREAM_METHOD, None, parse)

        def outcome(call: Any) -> str:
            try:
                responses = list(call)
            except grpc.RpcError as error:
                return str(error.code().name)
            return str(responses[-1].error_message)

        calls = [open_call(iter([request]), timeout=4.0) for _ in range(20)]
        outcomes = [pool.submit(outcome, call) for call in calls]
        os.kill(stub, signal.SIGKILL)
        for ended in outcomes:
            told = ended.result(WAIT_S)
            assert told == "DEADLINE_EXCEEDED" or "is not healthy" in told, told
    late = RawStream(by_hand.url, "x", {"max_tokens": 1}).wait()
    late.close()
    assert len(late.errors) == 1
    assert "is not healthy" in late.errors[0]
    for verb in ("unload", "load"):
        change(by_hand, verb)
    assert answer(by_hand) == before
    assert not any(region.exists() for region in shared_memory)
    by_hand.wait_idle()
