"""Front ends of one model in one server, with an engine process that counts instead of thinking."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cb_backend.contracts.config import EngineConfig
from cb_backend.front_end.engines.supervisor import EngineSupervisor
from tests.front_end.engines import (
    counting_config,
    make_supervisor,
)

STEP_S = "0.02"
LONG = 3000  # tokens; a minute, so that it is still running when a test interferes


class Fleet:
    """Front ends of one model in one server, closed at the end of the test.

    `gate`: while this file exists, an engine that starts does not come to serve. `hurry`: while this one exists, steps
    take no time.
    """

    def __init__(self, base: Path, gate: Path, hurry: Path) -> None:
        self.base, self.gate, self.hurry = base, gate, hurry
        self.members: list[EngineSupervisor] = []

    def add(self, config: EngineConfig | None = None, server_pid: int | None = None) -> EngineSupervisor:
        supervisor = make_supervisor(config or counting_config(), self.base, server_pid)
        self.members.append(supervisor)
        supervisor.start()
        return supervisor

    def close(self) -> None:
        for supervisor in self.members:
            supervisor.close()


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fleet]:
    gate, hurry = tmp_path / "gate", tmp_path / "hurry"
    for name, value in (("STEP_S", STEP_S), ("GATE", str(gate)), ("HURRY", str(hurry))):
        monkeypatch.setenv(f"CB_TEST_{name}", value)
    base = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))  # short: a socket's path has at most 107 bytes
    fleet = Fleet(base, gate, hurry)
    yield fleet
    gate.unlink(missing_ok=True)
    fleet.close()
    assert list(base.iterdir()) == [], "the last front end removes the runtime folder"
    shutil.rmtree(base)


def engine_pid(supervisor: EngineSupervisor) -> int:
    life = supervisor.client.members[0].life
    assert life is not None
    return life.pid


def running(supervisor: EngineSupervisor) -> int:
    stats = supervisor.client.members[0].stats
    return -1 if stats is None else stats.num_running + stats.num_waiting
