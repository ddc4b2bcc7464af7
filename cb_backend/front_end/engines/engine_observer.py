"""Running engines from outside: which there are, what their last steps were, and the one order they take.

An observer says no hello, so the engine neither waits for it nor lives for it. Requests cannot be sent from here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from cb_backend.contracts.errors import UnavailableError
from cb_backend.contracts.messages import (
    EngineStats,
    FrontEndMessage,
    ResetPrefixCache,
    decode_engine_message,
    encode,
)
from cb_backend.contracts.step_dump import DumpSteps, StepDump
from cb_backend.front_end.engines.runtime_dir import EngineLife, read_engines, runtime_base
from cb_backend.support.process_watch import process_start_time

T = TypeVar("T")


def running_engines(base: Path | None = None) -> list[EngineLife]:
    """This user's engines that are alive now, by pid. `base` holds one folder a model copy and server."""
    folders = sorted((base or runtime_base()).iterdir())
    lives = (life for folder in folders for life in read_engines(folder))
    return sorted(
        (life for life in lives if process_start_time(life.pid) == life.start_time), key=lambda life: life.pid
    )


def model_of(life: EngineLife) -> str:
    """What the engine was told to serve: a folder, file or hub id. Empty where its command line cannot be read."""
    try:
        words = Path(f"/proc/{life.pid}/cmdline").read_bytes().split(b"\0")
        return str(msgspec.json.decode(words[words.index(b"--config-json") + 1])["model"])
    except (OSError, ValueError, IndexError, KeyError, TypeError):  # ended meanwhile, or another program's pid
        return ""


def ask_for_steps(socket_path: str, max_steps: int, timeout_s: float = 10.0) -> StepDump:
    """The newest steps of the engine behind this socket. Raises `UnavailableError` if it does not answer in time."""
    return _ask(socket_path, DumpSteps(max_steps), StepDump, timeout_s)


def reset_prefix_cache(socket_path: str, timeout_s: float = 10.0) -> int:
    """Have the engine reuse nothing that it has computed until now; returns how many blocks resets have cost so far.

    Requests go on. Raises `UnavailableError` if it does not answer in time.
    """
    return _ask(socket_path, ResetPrefixCache(), EngineStats, timeout_s).num_reset_blocks


def _ask(socket_path: str, question: FrontEndMessage, kind: type[T], timeout_s: float) -> T:
    context = zmq.Context(io_threads=1)
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(f"ipc://{socket_path}")
        socket.send(encode(question))
        if not socket.poll(int(timeout_s * 1000)):
            raise UnavailableError(f"the engine at {socket_path} has not answered for {timeout_s:g} s; is it starting?")
        message = decode_engine_message(socket.recv())
    except msgspec.DecodeError as error:
        raise UnavailableError(f"the engine at {socket_path} speaks another version: {error}") from None
    finally:
        socket.close(linger=0)
        context.term()
    if not isinstance(message, kind):
        raise UnavailableError(f"the engine at {socket_path} answered with {type(message).__name__}")
    return message
