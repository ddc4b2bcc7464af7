"""Running engines from outside: which there are, what their last steps were, and the few orders they take.

An observer says no hello, so the engine neither waits for it nor lives for it. Requests cannot be sent from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from cb_backend.contracts.rest import CallOffOrders, RestAnswer, SetRest, UpdateWeights
from cb_backend.contracts.step_dump import DumpSteps, StepDump
from cb_backend.front_end.engines.runtime_dir import EngineLife, read_engines, runtime_base
from cb_backend.support.process_watch import process_start_time

CALL_OFF_S = 5.0  # for the engine to say that it has called off what was not done in time
WATCH_S = 0.5
LAST_WORDS_MS = 100  # that may still be on their way when the engine has ended

T = TypeVar("T")


class CalledOff(KeyboardInterrupt):
    """Ctrl-C has come while an order was waited for. `answer`: what the engine said of it then; None: nothing, as of
    one that has begun."""

    def __init__(self, answer: RestAnswer | None) -> None:
        self.answer = answer


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


def set_rest(
    life: EngineLife, is_asleep: bool, timeout_s: float = 60.0, is_wanted: Callable[[], bool] = lambda: True
) -> RestAnswer:
    """Have the model sleep, as soon as nothing runs, or wake. What is not so in time, or is not wanted any more, which
    is asked now and then, is called off: the answer says so.

    Raises `UnavailableError` if the engine does not answer, or ends, and `CalledOff` at Ctrl-C.
    """
    return _order(life, SetRest(is_asleep, time.monotonic() + timeout_s), timeout_s, is_wanted)


def update_weights(life: EngineLife, folder: str, timeout_s: float) -> RestAnswer:
    """Have it serve another checkpoint's weights. What has not begun in time is called off: the answer says so.

    Raises `UnavailableError` if the engine does not answer, as while it reads the weights, or ends, and `CalledOff` at
    Ctrl-C.
    """
    return _order(life, UpdateWeights(folder, time.monotonic() + timeout_s), timeout_s)


class _UnwantedError(Exception):
    """Whoever has given an order waits no more."""


def _order(
    life: EngineLife, order: SetRest | UpdateWeights, timeout_s: float, is_wanted: Callable[[], bool] = lambda: True
) -> RestAnswer:
    with _connected(life.socket_path) as socket:
        socket.send(encode(order))
        try:
            return _answer(socket, life.socket_path, RestAnswer, timeout_s + CALL_OFF_S, life, is_wanted)
        except KeyboardInterrupt:
            raise CalledOff(_call_off(socket, life)) from None
        except _UnwantedError:
            return _call_off(socket, life) or RestAnswer("", "what has begun goes on")


def _call_off(socket: zmq.Socket[bytes], life: EngineLife) -> RestAnswer | None:
    """What the engine says then of what it was told over this socket; None: nothing, as of what has begun."""
    socket.send(encode(CallOffOrders()))
    try:
        return _answer(socket, life.socket_path, RestAnswer, CALL_OFF_S, life)
    except UnavailableError:
        return None


def _ask(socket_path: str, question: FrontEndMessage, kind: type[T], timeout_s: float) -> T:
    with _connected(socket_path) as socket:
        socket.send(encode(question))
        return _answer(socket, socket_path, kind, timeout_s)


@contextmanager
def _connected(socket_path: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context(io_threads=1)
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(f"ipc://{socket_path}")
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


def _answer(
    socket: zmq.Socket[bytes],
    socket_path: str,
    kind: type[T],
    timeout_s: float,
    life: EngineLife | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> T:
    """`life`: of an engine whose end is not slept through. Raises `_UnwantedError` where `is_wanted` says no."""
    end = time.monotonic() + timeout_s
    while not socket.poll(int(1000 * max(min(end - time.monotonic(), WATCH_S), 0.0))):
        if life is not None and process_start_time(life.pid) != life.start_time and not socket.poll(LAST_WORDS_MS):
            raise UnavailableError(f"the engine {life.pid} has ended before it answered; it is started again.")
        if not is_wanted():
            raise _UnwantedError
        if time.monotonic() >= end:
            raise UnavailableError(f"the engine at {socket_path} has not answered for {timeout_s:g} s; is it starting?")
    try:
        message = decode_engine_message(socket.recv())
    except msgspec.DecodeError as error:
        raise UnavailableError(f"the engine at {socket_path} speaks another version: {error}") from None
    if not isinstance(message, kind):
        raise UnavailableError(f"the engine at {socket_path} answered with {type(message).__name__}")
    return message
