"""An observer of a real engine process: it sees the steps, and the engine does not live for it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cb_backend.cli.main import main
from cb_backend.cli.timeline_steps import from_dump
from cb_backend.errors import UnavailableError
from cb_backend.front_end.engine_observer import ask_for_steps, running_engines
from tests.front_end.engines import answer, counting_config, eventually, is_running, make_supervisor, submit


@pytest.fixture
def base() -> Iterator[Path]:
    """A short path: a socket's has at most 107 bytes."""
    base = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    yield base
    shutil.rmtree(base)


def test_steps_of_a_running_engine(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CB_TEST_STEP_S", "0.002")
    supervisor = make_supervisor(counting_config(max_num_seqs=4), base)
    try:
        supervisor.start()
        (life,) = running_engines(base)
        assert life == supervisor.client.members[0].life
        assert from_dump(ask_for_steps(life.socket_path, 100)).steps == []
        answer(supervisor, [1, 2, 3], 5)
        steps = from_dump(ask_for_steps(life.socket_path, 100)).steps
        assert [[row.num_tokens for row in step.rows] for step in steps] == [[3], [1], [1], [1], [1]]
        _, sink = submit(supervisor, [4] * 10, 2000)
        sink.wait_for_token()
        dump = ask_for_steps(life.socket_path, 3)
        busy = from_dump(dump)
        assert [len(step.rows) for step in busy.steps] == [1, 1, 1]
        assert (busy.header.num_slots, busy.header.num_blocks, busy.header.block_size) == (4, 1024, 16)
        assert sink.finish_reason == 0, "looking does not disturb"
        assert main(["cache", "reset", "--runtime-dir", str(base)]) == 0
        assert f"engine {life.pid}: " in capsys.readouterr().out
        assert sink.finish_reason == 0, "a reset of the cache does not either"
        assert sink.scheduled_at > steps[-1].end, "its first step came after the other request's last"
    finally:
        supervisor.close()
    eventually(lambda: not is_running(life.pid), "the engine ended with its front end, observed or not")
    assert running_engines(base) == []


def test_nobody_answers() -> None:
    with pytest.raises(UnavailableError, match="has not answered"):
        ask_for_steps("/tmp/cb-nobody-listens-here.sock", 10, timeout_s=0.1)
