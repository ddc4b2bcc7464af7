"""When an engine that has ended is started again: processes that only sleep, and a clock of the test's own."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from cb_backend.front_end.engines import engine_keeper
from cb_backend.front_end.engines.engine_keeper import EngineKeeper
from cb_backend.front_end.engines.runtime_dir import EngineLife


class Folder:
    """The runtime folder of one engine, in memory."""

    is_owner = True

    def __init__(self) -> None:
        self.life: EngineLife | None = None
        self._numbers = itertools.count()

    def engine(self, index: int) -> EngineLife | None:
        return self.life

    def write_engine(self, life: EngineLife, index: int) -> None:
        self.life = life

    def new_socket_path(self) -> str:
        return f"/socket-{next(self._numbers)}"


class Lives:
    """A keeper with one engine after the other, and the seconds between an end and the next start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(engine_keeper, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.client = SimpleNamespace(
            info=None, failure=None, ready_life=None, ended_life=None, connect=lambda life: None
        )
        self.folder = Folder()
        self.keeper = EngineKeeper(0, self.folder, self.client, self._launch)  # type: ignore[arg-type]
        self.keeper.tick(is_new_owner=True)

    def _launch(self, index: int, socket_path: str) -> subprocess.Popen[bytes]:
        self.processes.append(subprocess.Popen(["sleep", "3600"]))
        return self.processes[-1]

    def live(self, seconds: float, is_ready: bool) -> None:
        """The engine runs for so long, and is killed."""
        if is_ready:
            self.client.info, self.client.ready_life = object(), self.folder.life
        self.now += seconds
        self.processes[-1].kill()
        self.processes[-1].wait()
        self.client.ended_life = self.folder.life

    def delay(self) -> float:
        """Seconds until the next engine is started."""
        number, end = len(self.processes), self.now
        while len(self.processes) == number:
            self.keeper.tick(is_new_owner=False)
            self.now += 0.125
        self.now -= 0.125
        return self.now - end

    def close(self) -> None:
        self.keeper.close()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lives]:
    made = Lives(monkeypatch)
    yield made
    made.close()


def delays(lives: Lives, number: int, seconds: float, is_ready: bool) -> list[float]:
    found = []
    for _ in range(number):
        lives.live(seconds, is_ready)
        found.append(lives.delay())
    return found


def test_engines_that_served_are_soon_back_however_often_they_die(lives: Lives) -> None:
    assert delays(lives, 7, 12.0, is_ready=True) == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0]


def test_engines_that_die_at_their_start_are_tried_ever_less_often(lives: Lives) -> None:
    assert delays(lives, 1, 12.0, is_ready=True) == [0.5]
    assert delays(lives, 7, 3.0, is_ready=False) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert delays(lives, 1, 12.0, is_ready=True) == [4.0], "it has served since"


def test_an_engine_that_ran_for_a_minute_begins_anew(lives: Lives) -> None:
    assert delays(lives, 3, 12.0, is_ready=True) == [0.5, 1.0, 2.0]
    assert delays(lives, 2, 60.0, is_ready=True) == [0.5, 0.5]


def test_the_first_engine_is_not_tried_again(lives: Lives) -> None:
    lives.live(3.0, is_ready=False)
    lives.keeper.tick(is_new_owner=False)
    assert "before it was ready" in (lives.keeper.final_failure or "")
    lives.keeper.tick(is_new_owner=False)
    assert len(lives.processes) == 1
