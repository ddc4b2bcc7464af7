"""The engine's loop in a state that a whole process cannot be brought to: open requests and nothing to run."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError, GaveUpError
from cb_backend.contracts.messages import (
    EngineFailed,
    EngineReady,
    EngineStats,
    Hello,
    ModelInfo,
    decode_engine_message,
    encode,
)
from cb_backend.contracts.queue_room import QueueRoom
from cb_backend.engine import engine_loop, front_end_link
from cb_backend.engine.front_end_link import FrontEndLink, report_failed_start
from tests.waiting import WAIT_S

WAIT_MS = round(1000 * WAIT_S)
INFO = ModelInfo(
    model="m", tokenizer_dir="t", vocab_size=10, max_model_len=64, eos_token_ids=(), block_size=16, num_blocks=100,
    max_num_seqs=8, dtype="float32", device="cpu",
)  # fmt: skip


class StuckEngine:
    """Says that requests are open, and never has a step to run once it is told to be stuck."""

    info = INFO
    config = EngineConfig(model="m")
    is_stuck = False
    is_holding = False
    num_steps = 0
    queue_room = QueueRoom(None)

    def has_unfinished(self) -> bool:
        return self.is_stuck

    def expire(self) -> list[tuple[int, str]]:
        return []

    def release_held(self) -> list[tuple[int, Exception]]:
        return []

    def cancel(self, request_id: int) -> bool:
        return False

    def step(self) -> None:
        self.num_steps += 1

    def check_runner(self) -> None:
        """It is one process."""

    def stats(self) -> EngineStats:
        nothing = dict.fromkeys(("steps", "adapters", "rest"))
        return EngineStats(**{**dict.fromkeys(EngineStats.__struct_fields__, 0), **nothing})


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_the_reason_of_a_failed_start_waits_for_the_first_front_end(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(front_end_link, "FAILED_START_LINGER_S", 0.0)
    link = FrontEndLink(str(folder / "s"), os.getppid())
    telling = threading.Thread(target=report_failed_start, args=(link, ConfigError("the\n reason")))
    telling.start()
    telling.join(0.3)
    assert telling.is_alive(), "the front end that has started the engine was slow to come"
    context = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.connect(f"ipc://{folder / 's'}")
        socket.send(encode(Hello(1, os.getpid())))
        assert socket.poll(WAIT_MS)
        assert decode_engine_message(socket.recv()) == EngineFailed("the reason")
    telling.join(WAIT_S)
    assert not telling.is_alive()
    link.close()
    context.destroy(linger=0)


def test_no_progress_ends_the_engine_with_a_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "STALL_TIMEOUT_S", 0.3)
    engine, link = StuckEngine(), FrontEndLink(str(folder / "s"), os.getppid())
    process = engine_loop.EngineProcess(engine, link)  # type: ignore[arg-type]
    codes: list[int] = []
    loop = threading.Thread(target=lambda: codes.append(process.run()))
    loop.start()
    context = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.connect(f"ipc://{folder / 's'}")
        socket.send(encode(Hello(1, os.getpid())))
        assert socket.poll(WAIT_MS)
        ready = decode_engine_message(socket.recv())
        assert isinstance(ready, EngineReady)
        assert ready.info == INFO
        engine.is_stuck = True
        while socket.poll(WAIT_MS):
            message = decode_engine_message(socket.recv())
            if isinstance(message, EngineFailed):
                break
        else:
            pytest.fail("the engine never gave up")
    loop.join(WAIT_S)
    link.close()
    context.destroy(linger=0)
    assert "no progress" in message.message
    assert codes == [engine_loop.EXIT_GAVE_UP]
    assert engine.num_steps < 1000, "a stalled engine must not spin"


def test_an_engine_that_was_stopped_itself_does_not_give_up(folder: Path) -> None:
    now = 0.0
    engine, link = StuckEngine(), FrontEndLink(str(folder / "s"), os.getppid())
    process = engine_loop.EngineProcess(engine, link, lambda: now)  # type: ignore[arg-type]
    engine.is_stuck = True
    try:
        process.turn()
        now += 3600.0  # the process was stopped, or its machine slept
        process.turn()
        for _ in range(round(engine_loop.STALL_TIMEOUT_S) - 1):
            now += 1.0
            process.turn()
        now += 1.0
        with pytest.raises(GaveUpError, match="no progress"):
            process.turn()
    finally:
        link.close()
