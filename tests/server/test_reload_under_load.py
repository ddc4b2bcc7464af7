"""Models that are loaded again, unloaded, renamed and broken while clients stream, and other models stay.

pytest tests/server/test_reload_under_load.py; a hundred times: python -m tests.faults.reload
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cb_backend.cli.paths import checkout_path
from tests.server.conftest import RunningServer, running_server
from tests.server.metrics_text import Snapshot
from tests.server.raw_stream import RawStream
from tests.waiting import eventually

pytestmark = [pytest.mark.server, pytest.mark.slow]

LONG = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
BY_HAND = ("--model-control-mode=explicit", "--load-model=llm", "--load-model=llm_trtllm")
SECOND = {"text_input": "fox", "max_tokens": 4, "bad_words": "", "stop_words": ""}


def add_second(repository: Path) -> None:
    shutil.copytree(checkout_path("model_repository/llm_trtllm"), repository / "llm_trtllm")


class Reloaded:
    """A server, its repository, and what its counters were when somebody last looked."""

    def __init__(self, server: RunningServer, repository: Path) -> None:
        self.server, self.repository = server, repository
        self._counters: dict[Any, float] = {}

    def change(self, model: str = "llm", version: str = "1", **arguments: object) -> None:
        file = self.repository / model / version / "model.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **arguments}))

    def ask(self, verb: str, model: str = "llm") -> tuple[int, str]:
        return self.server.post(f"/v2/repository/models/{model}/{verb}", {})

    def ok(self, verb: str, model: str = "llm") -> None:
        status, text = self.ask(verb, model)
        assert status == 200, text

    def streams(self, count: int = 8) -> list[RawStream]:
        streams = [RawStream(self.server.url, f"stream {i}", LONG) for i in range(count)]
        for stream in streams:
            stream.wait(num_texts=1)
        return streams

    def end(self, streams: list[RawStream]) -> None:
        """Every one with its whole answer: a server that loads a model over itself lets the old one finish."""
        for stream in streams:
            stream.wait().close()
            assert (stream.errors, stream.num_finals) == ([], 1)
        self.check()

    def check(self, model: str = "llm") -> None:
        """It lives and answers; what it counts has grown, by the tokens of an answer at least."""
        assert self.server.process.poll() is None
        body = {"text_input": "fox", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        status, text = self.server.post(f"/v2/models/{model}/generate", body)
        assert status == 200, text
        before, self._counters = self._counters, Snapshot(self.server).counters()
        assert {key: value for key, value in before.items() if self._counters.get(key, -1.0) < value} == {}
        tokens = [value for (name, _), value in self._counters.items() if name == "cb_output_tokens_total"]
        assert sum(tokens) >= 4
        eventually(lambda: self.gauge("cb_engine_up", model) == [1.0], "the engine is up, and told once")

    def gauge(self, name: str, model: str) -> list[float]:
        family = Snapshot(self.server).families.get(name)
        samples = family.samples.items() if family is not None else ()
        return [value for (_, labels), value in samples if dict(labels)["model"] == model]


@contextlib.contextmanager
def running(checkpoint: Path, folder: Path, front_ends: int) -> Iterator[Reloaded]:
    """A server whose models are loaded by its clients."""
    options: dict[str, Any] = {"front_ends": front_ends, "prepare": add_second, "server_arguments": BY_HAND}
    with running_server(checkpoint, folder, exit_timeout_secs=20, **options) as server:
        yield Reloaded(server, folder)


@pytest.fixture(scope="module")
def reloaded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reloaded]:
    """Two front ends of `llm` and one of `llm_trtllm`."""
    with running(checkpoint, tmp_path_factory.mktemp("by_hand"), front_ends=2) as reloaded:
        yield reloaded


def test_r60_a_load_over_a_load_under_streams(reloaded: Reloaded) -> None:
    for length in (8001, 8002, 8003):
        streams = reloaded.streams()
        reloaded.change(max_model_len=length)
        reloaded.ok("load")
        reloaded.end(streams)


def test_r60_a_failing_load_over_a_good_one(reloaded: Reloaded) -> None:
    file = reloaded.repository / "llm" / "1" / "model.json"
    before = file.read_text()
    for broken in ('{"model": ', json.dumps({"model": "nowhere"}), json.dumps({**json.loads(before), "bloc_size": 8})):
        streams = reloaded.streams()
        file.write_text(broken)
        status, text = reloaded.ask("load")
        assert status == 400, text
        reloaded.end(streams)
        file.write_text(before)
    reloaded.ok("load")
    reloaded.check()


def test_r60_unloaded_and_loaded_again_its_counters_go_on_and_its_gauges_go_meanwhile(reloaded: Reloaded) -> None:
    reloaded.ok("unload", "llm_trtllm")
    reloaded.check()
    reloaded.ok("unload")
    eventually(lambda: reloaded.gauge("cb_engine_up", "llm") == [], "nobody says that an engine is up, or down")
    assert reloaded.gauge("cb_output_tokens_total", "llm") != []
    reloaded.ok("load")
    reloaded.check()
    reloaded.ok("load", "llm_trtllm")
    reloaded.check()


def test_r60i_unload_and_load_of_a_second_front(reloaded: Reloaded) -> None:
    for _ in range(2):
        streams = reloaded.streams()
        reloaded.ok("unload", "llm_trtllm")
        reloaded.end(streams)
        streams = reloaded.streams()
        reloaded.ok("load", "llm_trtllm")
        reloaded.end(streams)
    status, text = reloaded.server.post("/v2/models/llm_trtllm/generate", dict(SECOND))
    assert status == 200, text


def test_r60i_the_second_front_stays_while_the_first_is_loaded_again(reloaded: Reloaded) -> None:
    reloaded.change(max_model_len=8004)
    reloaded.ok("load")
    status, text = reloaded.server.post("/v2/models/llm_trtllm/generate", dict(SECOND))
    assert status == 200, text
    reloaded.check()
    reloaded.ok("unload", "llm_trtllm")
    reloaded.ok("load", "llm_trtllm")
    eventually(lambda: len(reloaded.server.engine_pids()) == 1, "nobody is left on the old engine")
    reloaded.check()


def test_r60_a_new_version_beside_streams_of_the_old(reloaded: Reloaded) -> None:
    streams = reloaded.streams()
    shutil.copytree(reloaded.repository / "llm" / "1", reloaded.repository / "llm" / "2")
    reloaded.ok("load")
    reloaded.end(streams)
    streams = reloaded.streams()
    shutil.rmtree(reloaded.repository / "llm" / "2")
    reloaded.ok("load")
    reloaded.end(streams)


def test_r60_a_renamed_model_beside_streams_of_the_old(reloaded: Reloaded) -> None:
    streams = reloaded.streams()
    shutil.copytree(reloaded.repository / "llm", reloaded.repository / "renamed")
    reloaded.ok("load", "renamed")
    reloaded.check("renamed")
    reloaded.end(streams)
    reloaded.ok("unload", "renamed")
    reloaded.check()


@pytest.mark.long
def test_r60_r60i_with_four_front_ends(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path, front_ends=4) as reloaded:
        test_r60_a_load_over_a_load_under_streams(reloaded)
        test_r60i_unload_and_load_of_a_second_front(reloaded)


def test_r61_changes_that_the_server_finds_by_polling(checkpoint: Path, tmp_path: Path) -> None:
    """NOTE: once in some 80 runs server 24.10 found the removal not within two minutes, and did not end either; why is
    not known. So a second server may show it."""
    try:
        _polled_changes(checkpoint, tmp_path / "first")
    except NotFoundError as error:
        warnings.warn(f"the first server stood still: {error}", stacklevel=1)
        _polled_changes(checkpoint, tmp_path / "second")


class NotFoundError(AssertionError):
    """A folder that is gone was not found so."""


def _polled_changes(checkpoint: Path, repository: Path) -> None:
    repository.mkdir()
    arguments = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with running_server(checkpoint, repository, server_arguments=arguments, prepare=add_second) as server:
        reloaded = Reloaded(server, repository)
        streams, before = reloaded.streams(), set(server.engine_pids())
        reloaded.change(max_model_len=8001)
        eventually(lambda: bool(set(server.engine_pids()) - before), "the change is found")
        reloaded.end(streams)
        streams = reloaded.streams()
        shutil.move(repository / "llm_trtllm", repository.with_name(f"{repository.name}_taken_away"))
        gone = lambda: server.post("/v2/models/llm_trtllm/generate", dict(SECOND))[0] != 200  # noqa: E731
        try:
            eventually(gone, "the second front is unloaded")
        except AssertionError as error:
            raise NotFoundError(str(error)) from None
        reloaded.end(streams)


@pytest.mark.parametrize("front_ends", [1, 2])
def test_s90_every_process_ends_well_whatever_it_has_served(checkpoint: Path, tmp_path: Path, front_ends: int) -> None:
    """What is wrong with an end fails at the end of the context, as at that of every server of the tests."""
    with running_server(checkpoint, tmp_path, front_ends=front_ends, exit_timeout_secs=60) as server:
        answers = [RawStream(server.url, f"fox {i}", {**LONG, "max_tokens": 40}, stream=i % 2 == 0) for i in range(12)]
        for answer in answers:
            answer.wait().close()
            assert answer.errors == []
        refused = RawStream(server.url, "fox", {"max_tokens": 0}).wait()
        refused.close()
        assert len(refused.errors) == 1
        cancelled = [RawStream(server.url, f"fox {i}", LONG) for i in range(4)]
        for stream in cancelled:
            stream.wait(num_texts=2).close(cancel=True)
        server.wait_idle()
