"""A server whose model sleeps when it is told to, the commands that tell it, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cb_backend.cli.main import main
from tests.server.conftest import RunningServer, running_server
from tests.server.raw_stream import RawStream
from tests.waiting import eventually

GREEDY = {"max_tokens": 24, "temperature": 0}
PROMPTS = ["the quick brown fox", "seven wizards " * 30, "fox"]


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Sleeps only when it is told to."""
    with running_server(checkpoint, tmp_path_factory.mktemp("sleeping"), idle_sleep_s=0) as running:
        yield running


def command(server: RunningServer, *words: str) -> int:
    (engine,) = server.engine_pids()
    return main([*words, "--engine-pid", str(engine)])


def answer(server: RunningServer, prompt: str) -> str:
    stream = RawStream(server.url, prompt, GREEDY).wait()
    stream.close()
    assert stream.errors == []
    return stream.text


def answer_when_served(server: RunningServer, prompt: str) -> str:
    """Once an engine that has died is replaced."""
    texts: list[str] = []

    def is_served() -> bool:
        attempt = RawStream(server.url, prompt, GREEDY).wait()
        attempt.close()
        texts.append(attempt.text)
        return not attempt.errors

    eventually(is_served, "requests are served again")
    return texts[-1]


def is_asleep(server: RunningServer) -> bool:
    return server.gauge("cb_engines_asleep", "llm") == 1.0
