"""Processes of ranks that are stopped, killed or closed: nothing hangs, and the reason is said."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cb_backend import LLM, SamplingParams
from cb_backend.cli.server.processes import descendants
from cb_backend.contracts.step import MaskSource, StepPlan
from cb_backend.engine.workers import WORKER_MODULE
from tests.llm.conftest import ARGUMENTS
from tests.llm.test_llm import GREEDY, PROMPTS
from tests.llm.test_ranks import is_gone, pids, ranked, tokens
from tests.server.conftest import _command_line
from tests.waiting import eventually

__all__ = ["ranked"]  # a fixture


def test_a_stopped_rank_goes_on_where_it_was(ranked: LLM) -> None:
    before = tokens(ranked)
    (pid,) = pids(ranked).values()
    os.kill(pid, signal.SIGSTOP)
    try:
        stream = ranked.stream(PROMPTS[0], GREEDY)
        waker = os.fork()
        if not waker:
            time.sleep(1)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        got = [token for chunk in stream for token in chunk.output.token_ids]
        os.waitpid(waker, 0)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert got == before[0]


@pytest.mark.parametrize("when", ["idle", "prefill", "decoding"])
def test_a_killed_rank_ends_its_prompts_with_a_reason(
    when: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(checkpoint), tensor_parallel_size=2, max_num_batched_tokens=8, **ARGUMENTS) as killed:
        (pid,) = pids(killed).values()
        runner, execute = killed._engine.runner, killed._engine.runner.execute

        def kill_in_prompt(plan: StepPlan, masks: MaskSource) -> Any:
            if plan.first[0] > 0:  # the second step of the prompt
                os.kill(pid, signal.SIGKILL)
            return execute(plan, masks)

        if when == "prefill":
            monkeypatch.setattr(runner, "execute", kill_in_prompt)
        prompt = PROMPTS[0] * 5
        stream = killed.stream(prompt, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        if when == "decoding":
            next(stream)
        if when != "prefill":
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(Exception, match=rf"rank 1 \(process {pid}\) has ended by signal 9 \(SIGKILL\)"):
            list(stream)
        (again,) = killed.generate(PROMPTS[0], GREEDY)
        assert "SIGKILL" in str(again.error)


def workers_here() -> set[int]:
    return {process.pid for process in descendants(os.getpid()) if WORKER_MODULE in _command_line(process.pid)}


def kill_worker(folder: Path, is_there: bool, others: set[int]) -> None:
    """The next process of a rank that is started: at once, or when it is about to meet the others."""
    for _ in range(3000):
        has_come = bool(list(folder.glob("cb_backend_ranks_*/rank1.here")))
        started = workers_here() - others
        if started and (has_come or not is_there):
            os.kill(started.pop(), signal.SIGKILL)
            return
        time.sleep(0.01)


@pytest.mark.parametrize("is_there", [False, True], ids=["starting", "loading"])
def test_a_rank_that_is_killed_before_it_serves_is_said(
    is_there: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killer = threading.Thread(target=kill_worker, args=(tmp_path, is_there, workers_here()))
    killer.start()
    try:
        with pytest.raises(Exception, match=r"rank 1 \(process \d+\) has ended by signal 9 \(SIGKILL\)"):
            LLM(str(checkpoint), tensor_parallel_size=2, **ARGUMENTS)
    finally:
        killer.join()
    assert not list(tmp_path.glob("cb_backend_ranks_*")), "nothing of it is left"


def test_closing_ends_the_other_ranks(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with LLM(str(checkpoint), tensor_parallel_size=2, **ARGUMENTS) as closed:
        (pid,) = pids(closed).values()
        assert not is_gone(pid)
        assert not list(tmp_path.glob("cb_backend_ranks_*")), "a killed program leaves nothing either"
    eventually(lambda: is_gone(pid), "the other rank has ended")
