"""The real runner, whose engine dies, or whose memory fails, while it falls asleep or wakes: once, as a file says.

`worker_cls` names `create_runner`; the file is named by CB_TEST_SLEEPER and holds "sleep kill", "wake raise" and so on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.messages import ModelInfo
from cb_backend.engine.runner import runner_factory
from cb_backend.engine.runner.slot_runner import SlotRunner

ENVIRONMENT = "CB_TEST_SLEEPER"


def create_runner(config: EngineConfig, weights: Path | None = None) -> tuple[SlotRunner, ModelInfo]:
    runner, info = runner_factory.create_runner(config, weights)
    sleeper: Any = runner.sleeper
    for name in ("sleep", "wake"):
        setattr(sleeper, name, _failing(name, getattr(sleeper, name), Path(os.environ[ENVIRONMENT])))
    return runner, info


def _failing(name: str, call: Callable[..., None], file: Path) -> Callable[..., None]:
    def called(*arguments: Any) -> None:
        asked = file.read_text().split() if file.is_file() else ["", ""]
        if asked[0] != name:
            call(*arguments)
            return
        file.unlink()
        if asked[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"memory fails while it shall {name}")

    return called
