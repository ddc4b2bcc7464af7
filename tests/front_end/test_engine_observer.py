"""An observer of a real engine process: it sees the steps, and the engine does not live for it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cb_backend.cli.main import main
from cb_backend.cli.timelines.steps import from_dump
from cb_backend.contracts.errors import UnavailableError
from cb_backend.front_end.engines.engine_observer import (
    ask_for_steps,
    model_of,
    reset_prefix_cache,
    running_engines,
)
from cb_backend.front_end.engines.supervisor import EngineSupervisor
from tests.front_end.engines import answer, counting_config, is_running, make_supervisor, submit
from tests.waiting import WAIT_S, eventually


@pytest.fixture
def base() -> Iterator[Path]:
    """A short path: a socket's has at most 107 bytes."""
    base = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    yield base
    shutil.rmtree(base)


def test_steps_of_a_running_engine(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CB_TEST_STEP_S", "0.02")
    supervisor = make_supervisor(counting_config(max_num_seqs=4), base)
    try:
        supervisor.start()
        (life,) = running_engines(base)
        assert life == supervisor.client.members[0].life
        assert model_of(life) == supervisor.client.members[0].info.model
        assert model_of(replace(life, pid=os.getpid())) == "", "another program's"
        assert from_dump(ask_for_steps(life.socket_path, 100, WAIT_S)).steps == []
        answer(supervisor, [1, 2, 3], 5)
        steps = from_dump(ask_for_steps(life.socket_path, 100, WAIT_S)).steps
        assert [[row.num_tokens for row in step.rows] for step in steps] == [[3], [1], [1], [1], [1]]
        _, sink = submit(supervisor, [4] * 10, 4000)
        sink.wait_for_token()
        dump = ask_for_steps(life.socket_path, 3, WAIT_S)
        busy = from_dump(dump)
        assert [len(step.rows) for step in busy.steps] == [1, 1, 1]
        assert (busy.header.num_slots, busy.header.num_blocks, busy.header.block_size) == (4, 1024, 16)
        assert sink.finish_reason == 0, "looking does not disturb"
        picture = base / "timeline.html"
        assert main(["timeline", "live", "--runtime-dir", str(base), "--out", str(picture)]) == 0
        assert f"{Path(model_of(life)).name}, pid {life.pid}: the last steps at 20" in picture.read_text()
        picture.unlink()
        capsys.readouterr()
        assert main(["cache", "reset", "--runtime-dir", str(base)]) == 0
        assert f"engine {life.pid}: " in capsys.readouterr().out
        assert sink.finish_reason == 0, "a reset of the cache does not either"
        assert sink.scheduled_at > steps[-1].end, "its first step came after the other request's last"
    finally:
        supervisor.close()
    eventually(lambda: not is_running(life.pid), "the engine ended with its front end, observed or not")
    assert running_engines(base) == []


def num_cached_tokens(supervisor: EngineSupervisor) -> int:
    """Prompt tokens that this model's engines have found in their caches until now."""
    return sum(client.stats.num_cached_prompt_tokens for client in supervisor.client.members if client.stats)


def ask_again(supervisor: EngineSupervisor) -> int:
    """Ask what is always asked; returns how many tokens of it were cached. Each engine gets some of the prompts."""
    before = num_cached_tokens(supervisor)
    for start in range(8):
        answer(supervisor, list(range(start, start + 80)), 1)
    return num_cached_tokens(supervisor) - before


def test_a_reset_reaches_every_engine_of_its_model_and_no_other(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any engine of a model may get the next request, so one whose cache is kept would serve on from it."""
    ours, others = (make_supervisor(counting_config(data_parallel_size=2), base, name=name) for name in ("a", "b"))
    try:
        for supervisor in (ours, others):
            supervisor.start()
            eventually(lambda s=supervisor: all(c.is_ready for c in s.client.members), "both engines are there")
            assert ask_again(supervisor) == 0
            assert ask_again(supervisor) == 8 * 64, "of each prompt all whole blocks but the last"
        pids = [client.life.pid for client in ours.client.members if client.life is not None]
        assert len(set(pids)) == 2

        assert main(["cache", "reset", "--runtime-dir", str(base)]) == 1
        told_apart = capsys.readouterr().err
        assert "engines of several models are running" in told_apart
        assert all(f"{pid} {model_of(ours.client.members[0].life)}" in told_apart for pid in pids)
        assert main(["cache", "reset", "--runtime-dir", str(base), "--engine-pid", str(pids[1])]) == 0
        told = re.findall(r"engine (\d+): .*\((\d+) blocks", capsys.readouterr().out)
        assert [int(pid) for pid, _ in told] == sorted(pids)
        assert all(int(num_blocks) > 0 for _, num_blocks in told), "each engine has had some of the prompts"
        assert ask_again(ours) == 0, "nothing is reused, whichever engine is asked"
        assert ask_again(others) == 8 * 64, "the other model keeps its caches"

        assert main(["cache", "reset", "--runtime-dir", str(base), "--engine-pid", "1"]) == 1
        assert "no engine of yours has pid 1" in capsys.readouterr().err
        assert main(["sleep", "b", "--runtime-dir", str(base), "--engine-pid", str(pids[0])]) == 1
        assert f"engine {pids[0]} does not serve 'b'; leave one of them out" in capsys.readouterr().err
        others.close()
        os.kill(pids[0], signal.SIGSTOP)
        monkeypatch.setattr(
            "cb_backend.cli.cache.reset_prefix_cache",
            lambda path: reset_prefix_cache(
                path, timeout_s=0.1 if path == ours.client.members[0].life.socket_path else 60
            ),
        )
        try:
            assert main(["cache", "reset", "--runtime-dir", str(base)]) == 1
        finally:
            os.kill(pids[0], signal.SIGCONT)
        told = capsys.readouterr()
        assert f"engine {pids[0]} was not reset: " in told.err
        assert f"engine {pids[1]}: its prefix cache is empty" in told.out, "the others are reset all the same"
    finally:
        ours.close()
        others.close()


def test_who_must_choose_is_told_what_tells_engines_apart(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two servers, and two models of one checkpoint in the second."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
    servers = [
        subprocess.Popen([*sleeper, "--model-repository=r", "--http-port=8123"]),
        subprocess.Popen(sleeper),  # embedded: nobody knows its port
    ]
    supervisors = [
        make_supervisor(counting_config(), base, servers[0].pid),
        make_supervisor(counting_config(), base, servers[1].pid),
        make_supervisor(counting_config(), base, servers[1].pid, name="other"),
    ]
    wheres = [
        f"(llm version 1 in server {servers[0].pid}, HTTP port 8123)",
        f"(llm version 1 in server {servers[1].pid})",
        f"(other version 1 in server {servers[1].pid})",
    ]
    try:
        for supervisor in supervisors:
            supervisor.start()
        told = [
            f"{supervisor.client.members[0].life.pid} counting {where}"
            for supervisor, where in zip(supervisors, wheres, strict=True)
        ]
        for command in (["timeline", "live"], ["cache", "reset"]):
            for options in ([], ["--engine-pid", "1"]):
                assert main([*command, "--runtime-dir", str(base), *options]) == 1
                error = capsys.readouterr().err
                assert all(text in error for text in told), error
                assert options or "--engine-pid" in error
    finally:
        for supervisor in supervisors:
            supervisor.close()
        for server in servers:
            server.kill()
            server.wait()


def test_nobody_answers() -> None:
    with pytest.raises(UnavailableError, match="has not answered"):
        ask_for_steps("/tmp/cb-nobody-listens-here.sock", 10, timeout_s=0.1)
