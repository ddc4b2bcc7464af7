"""Processes of other ranks, with small ones in their place: what is told of their end, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.step import NoMasks, StepPlan
from cb_backend.engine import worker_process
from cb_backend.engine.rank_faults import first_fault, leave_fault
from cb_backend.engine.runner import ranks as ranks_room
from cb_backend.engine.runner.ranks import RankedRunner
from cb_backend.engine.workers import Workers, WorkersLostError
from cb_backend.parallel.plan_ring import RingReader, RingWriter
from tests.waiting import eventually

NO_ROWS = np.empty(0, np.int32)
PLAN = StepPlan(1, NO_ROWS, NO_ROWS, NO_ROWS, np.empty(0, np.uint8), 0)


@pytest.fixture
def workers(tmp_path: Path) -> Any:
    """Of ranks 1 to 3, which sleep until they are told how to end."""
    made = Workers(EngineConfig(model="none", tensor_parallel_size=4), tmp_path)
    for rank in range(1, 4):
        made._processes[rank] = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.exit(int(sys.stdin.readline() or 0))"], stdin=subprocess.PIPE
        )
    yield made
    made.end()


def fails(workers: Workers, rank: int) -> None:
    """With an exit code, as what a rank cannot go on with ends it."""
    process = workers._processes[rank]
    process.communicate(b"1\n")


def test_of_those_that_have_ended_the_one_that_was_killed_is_named(workers: Workers) -> None:
    """As by a system without memory: whoever waits for it then fails by itself, at once."""
    assert workers.lost() is None
    fails(workers, 1)
    assert workers.lost() == f"rank 1 (process {workers.pids[1]}) has ended with exit code 1"
    os.kill(workers.pids[3], signal.SIGKILL)
    workers._processes[3].wait()
    assert workers.lost() == f"rank 3 (process {workers.pids[3]}) has ended by signal 9 (SIGKILL)"
    leave_fault(workers.folder, 1, RuntimeError("Connection closed by peer"))
    told = f"rank 3 (process {workers.pids[3]}) has ended by signal 9 (SIGKILL) while the model was loaded; its reason"
    assert str(workers.why_lost()).startswith(told)


@pytest.mark.parametrize("kind", [ConfigError, MemoryError, ValueError])
def test_why_a_rank_cannot_load_is_told_as_rank_0_would_say_it(kind: type[Exception], workers: Workers) -> None:
    """The first one: what others say after it is because of it."""
    assert first_fault(workers.folder) is None
    leave_fault(workers.folder, 2, kind("0.50 GiB are free; lower max_num_seqs"))
    leave_fault(workers.folder, 1, ConfigError("later"))
    fails(workers, 1)
    found = workers.why_lost()
    if kind is ValueError:  # with its trace in the log
        assert type(found) is RuntimeError
        assert str(found) == "rank 2 could not load its part of the model; its reason is above in the log"
    else:
        assert type(found) is kind
        assert str(found) == "rank 2: 0.50 GiB are free; lower max_num_seqs"


def test_no_descriptor_is_left_of_those_that_were_watched(workers: Workers) -> None:
    before = len(os.listdir("/proc/self/fd"))
    workers.call_when_lost(lambda: None)
    workers.end()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "the watches are closed")


class Stand:
    """For all that a rank's process drives."""

    is_late = False

    def next(self, timeout_s: float) -> bytes | None:
        assert not self.is_late, "it looks before it waits again"
        assert timeout_s <= 1, "it looks now and then where no plan comes"
        Stand.is_late = True
        return None

    def fault(self) -> str | None:
        return "a rank did not come to a sum within 20 s" if self.is_late else None


def test_a_rank_ends_where_its_own_group_has_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may have come to all sums itself: it would go on with what this rank adds to them, which is no number."""
    monkeypatch.setattr(Stand, "is_late", False)
    stand: Any = Stand()
    monkeypatch.setattr(ranks_room, "create_shard", lambda *_: ranks_room.Shard(stand, stand, stand, None))
    with pytest.raises(WorkersLostError, match="a rank did not come to a sum within 20 s"):
        worker_process.run(EngineConfig(model="none"), tmp_path, 1, None)


def test_what_a_rank_cannot_load_it_leaves_for_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_: Any) -> None:
        raise ConfigError("no room for a KV cache")

    monkeypatch.setattr(ranks_room, "create_shard", create)
    with pytest.raises(ConfigError):
        worker_process.run(EngineConfig(model="none"), tmp_path, 1, None)
    assert str(first_fault(tmp_path)) == "rank 1: no room for a KV cache"


class Own:
    """Rank 0's part, and its group."""

    adapters = None

    def execute(self, plan: StepPlan, masks: NoMasks) -> None:
        """There is nothing in it."""

    def fault(self) -> str | None:
        return None


class HastyRing(RingWriter):
    def publish(self, message: bytes, timeout_s: float = 0.05) -> None:
        super().publish(message, timeout_s)


def test_a_rank_that_takes_no_plans_is_named(workers: Workers) -> None:
    path, sizes = workers.folder / "plans", {"slot_bytes": 256, "num_slots": 2}
    ring, own = HastyRing(path, 3, **sizes), Own()
    others = [RingReader(path, reader, 3, **sizes) for reader in (0, 2)]
    runner: Any = RankedRunner(own, workers, ring, own)  # type: ignore[arg-type]
    for _ in range(2):
        runner.execute(PLAN, NoMasks())
        assert None not in [other.next(0) for other in others]
    with pytest.raises(WorkersLostError, match=r"^rank 2 lives, but has taken no plan for 0\.05 s$"):
        runner.execute(PLAN, NoMasks())
    assert runner.lost() == "rank 2 lives, but has taken no plan for 0.05 s"
    for end in (ring, *others):
        end.close()


def test_after_a_step_that_was_broken_off_there_is_no_other(workers: Workers) -> None:
    """The others wait in it for rank 0, which would come to them with the next one."""

    class BrokenOff(Own):
        def execute(self, plan: StepPlan, masks: NoMasks) -> None:
            raise KeyboardInterrupt

    own: Any = BrokenOff()
    ring = RingWriter(workers.folder / "plans", 3)
    runner = RankedRunner(own, workers, ring, own)
    with pytest.raises(KeyboardInterrupt):
        runner.execute(PLAN, NoMasks())
    with pytest.raises(WorkersLostError, match="rank 0 was interrupted in a step"):
        runner.execute(PLAN, NoMasks())
    ring.close()
