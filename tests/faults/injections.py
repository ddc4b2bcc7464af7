"""The faults of processes, clients and steps, F1 to F10: what is done, and what clients may see of it.

An injection does its deed to a `World` and leaves a `Window` that says from when until when. What it finds wrong by
itself goes to `world.notes`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.checker import Window
from tests.faults.stalled_reader import StalledReader
from tests.faults.world import World
from tests.waiting import WAIT_S

RESTART = frozenset({"UNAVAILABLE"})
INTERNAL = frozenset({"INTERNAL"})
CANCELLED_COUNT = "cb_engine_cancellations_total"


@dataclass(frozen=True, slots=True)
class Fault:
    """`inject` may be called again and again on one world; `is_last`: the server does not survive it."""

    name: str
    what: str
    inject: Callable[[World, int], None]  # the second argument counts the injections
    server: dict[str, Any] = field(default_factory=dict)
    load: tuple[str, ...] = ()
    is_last: bool = False
    recovery_s: float = 30.0  # in which a canary must be well again, asked of a quiet machine; windows allow more
    prepare: Callable[[Path], dict[str, Any]] | None = None  # makes files, gives further values of `server`


def window(world: World, begin: float, **limits: Any) -> None:
    world.windows.append(Window(begin, time.monotonic(), **limits))


def restart_window(world: World, begin: float, codes: frozenset[str]) -> None:
    """Of a fault after which the engine may have to start again."""
    window(world, begin, codes=codes, recovery_limit_s=world.restart_limit_s)


def kill_clients(world: World, number: int) -> None:
    """F1. The engine must have dropped their requests within a second, and half a second to tell of it."""
    num_streams = (1, 8, 16)[number % 3]
    before = world.server.gauge(CANCELLED_COUNT, "llm") or 0.0
    client = world.client(f"victim{number}", "--streams", str(num_streams), "--long")
    started = lambda: len({e.request for e in client.read() if e.kind == "delta"}) == num_streams  # noqa: E731
    world.wait(started, 60, "the victims' streams run")
    begin = time.monotonic()
    world.killed.add(client.name)
    client.kill()
    window(world, begin, recovery_limit_s=5.0)
    dropped = lambda: (world.server.gauge(CANCELLED_COUNT, "llm") or 0.0) - before >= num_streams  # noqa: E731
    took = world.wait(dropped, 30, f"{num_streams} requests of a killed client are dropped")
    if took > 3.0:
        world.notes.append(f"the requests of a killed client were dropped only after {took:.1f} s")


def cancel_storm(world: World, number: int) -> None:
    """F2. 32 streams that do nothing but cancel, for 5 s."""
    begin = time.monotonic()
    client = world.client(f"storm{number}", "--streams", "32", "--cancel-fraction", "1", "--seed", str(number))
    time.sleep(5.0)
    client.stop()
    window(world, begin, recovery_limit_s=10.0)


def stalled_reader(world: World, number: int) -> None:
    """F3. A client that sends a long request and never reads, for 5 s; then it goes."""
    begin = time.monotonic()
    with StalledReader(world.server.url):
        time.sleep(5.0)
        num_deltas = sum(e.kind == "delta" and e.time >= begin for e in world.load.read())
    if num_deltas == 0:
        world.notes.append("the other clients got nothing beside one that does not read")
    window(world, begin, recovery_limit_s=10.0)


def pause(world: World, number: int) -> None:
    """F4. The engine stands still for 5 s, in turn with a stub for half a second. Nothing may be lost.

    NOTE: a stub that does not run for a second is "not healthy" to server 24.10, which then fails its requests, and was
    seen to abort as a whole (boost's lock_exception) when the stub stood still for 5 s. That is out of our hands.
    """
    is_engine = number % 2 == 0
    pid = world.engine() if is_engine else world.rng.choice(world.stubs())
    begin = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(5.0 if is_engine else 0.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    window(world, begin, recovery_limit_s=10.0)


def kill_engine(world: World, number: int) -> None:
    """F5. Open streams must hear of it within 2 s."""
    begin = time.monotonic()
    os.kill(world.engine(), signal.SIGKILL)
    restart_window(world, begin, RESTART)
    world.wait_for_canary(begin)


def fail_row(world: World, number: int) -> None:
    """F7. One row of one step is not finite: one request ends with INTERNAL, and no other."""
    count = lambda: sum(e.kind == "error" and e.code == "INTERNAL" for e in world.load.read())  # noqa: E731
    before, begin = count(), time.monotonic()
    world.faults.write(("nan row", "inf row", "-inf row")[number % 3])
    world.wait(lambda: count() > before, WAIT_S, "the request with the broken row ends")
    window(world, begin, codes=INTERNAL, recovery_limit_s=3.0)
    time.sleep(1.0)
    if count() != before + 1:
        world.notes.append(f"one broken row ended {count() - before} requests")


def fail_step(world: World, number: int) -> None:
    """F8. A whole step fails; each fourth time three in a row, after which the engine starts anew."""
    is_restart = number % 4 == 3
    old, begin = world.engine(), time.monotonic()
    world.faults.write("raise" if number % 2 == 0 else "memory", 3 if is_restart else 1)
    failed = lambda: any(e.kind == "error" and e.time >= begin for e in world.load.read())  # noqa: E731
    world.wait(failed, WAIT_S, "the failed step's requests end")
    if is_restart:
        world.wait(lambda: old not in world.server.engine_pids(), 30, "the engine gives up after three failed steps")
    restart_window(world, begin, INTERNAL | RESTART if is_restart else INTERNAL)
    world.wait_for_canary(begin)
    if not is_restart and world.engine() != old:
        world.notes.append("one failed step ended the engine")


def hang(world: World, number: int) -> None:
    """F9. A step that never ends: the watchdog, set to 3 s, replaces the engine."""
    old, begin = world.engine(), time.monotonic()
    world.faults.write("hang")
    world.wait(lambda: old not in world.server.engine_pids(), 30, "the hung engine is ended")
    restart_window(world, begin, RESTART)
    world.wait_for_canary(begin)


def fail_allocation(world: World, number: int) -> None:
    """F10. No memory for a step, for a block, for a copy to the host."""
    kind = ("memory", "block", "swap")[number % 3]
    begin = time.monotonic()
    world.faults.write(kind)
    failed = lambda: any(e.kind == "error" and e.time >= begin for e in world.load.read())  # noqa: E731
    try:
        world.wait(failed, 20, "")
    except TimeoutError:
        world.faults.write("nothing", 0)  # no request had to be swapped
        world.notes.append(f"the fault {kind!r} was armed and never met")
    restart_window(world, begin, INTERNAL | RESTART)
    world.wait_for_canary(begin)


WATCHDOG = {"watchdog_timeout_s": 3.0}
# A pool that 17 requests outgrow again and again, so that there is something to swap.
TIGHT = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 60, "swap_space": 0.01, "max_model_len": 900}

FAULTS = (
    Fault("F1", "kill -9 of a client with 1, 8, 16 streams", kill_clients),
    Fault("F2", "32 streams that only cancel, 5 s", cancel_storm),
    Fault("F3", "a client that never reads", stalled_reader),
    Fault("F4", "SIGSTOP of the engine, 5 s, or a stub, 0.5 s", pause, recovery_s=5.0),
    Fault("F5", "kill -9 of the engine", kill_engine),
    Fault("F7", "NaN, inf or -inf in one row", fail_row),
    Fault("F8", "a whole step fails, once or three times", fail_step),
    Fault("F9", "a step that hangs", hang, server=WATCHDOG),
    Fault("F10", "no memory for a step, a block, a swap", fail_allocation, server=TIGHT),
)
