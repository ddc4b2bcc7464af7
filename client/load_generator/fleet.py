"""The parent's side of the client processes: share out the work, start them together, collect the records.

Knows processes and pipes; how a request is sent is `worker`'s, what the figures mean is `summary`'s.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from .contracts import ClientHealth, Done, Progress, Ready, WorkerSpec
from .records import RequestRecord
from .worker import run_process

START_DELAY_S = 0.2  # between "all ready" and the common start
STOP_TIMEOUT_S = 30.0  # for the processes to cancel their requests after Ctrl-C
READY_TIMEOUT_S = 600.0


@dataclass
class FleetResult:
    """What all processes together did in one run."""

    records: list[RequestRecord] = field(default_factory=list)
    health: list[ClientHealth] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    was_interrupted: bool = False


def share(template: WorkerSpec, num_processes: int) -> list[WorkerSpec]:
    """A spec for each process: open loop by turns, closed loop by streams. Idle processes are left out."""
    specs = []
    for process in range(num_processes):
        streams = template.num_streams
        if streams is not None:
            streams = streams // num_processes + (process < streams % num_processes)
            if streams == 0:
                continue
        specs.append(
            replace(
                template,
                process=process,
                num_streams=streams,
                requests=template.requests[process::num_processes] if streams is None else template.requests,
                warm_up=template.warm_up[process::num_processes],
            )
        )
    return specs


def total(parts: dict[int, Progress]) -> Progress:
    """Sum over the processes, without records."""
    values = parts.values()
    return Progress(
        num_sent=sum(part.num_sent for part in values),
        num_done=sum(part.num_done for part in values),
        num_failed=sum(part.num_failed for part in values),
        num_tokens=sum(part.num_tokens for part in values),
    )


def run_fleet(specs: list[WorkerSpec], on_progress: Callable[[float, Progress], None]) -> FleetResult:
    """Run the processes to their end. `on_progress(elapsed_s, totals)` is called about twice a second.

    Ctrl-C stops the run and keeps what was done; a second Ctrl-C ends the processes at once. A process that dies is
    a warning.
    """
    context = multiprocessing.get_context("spawn")
    next_index = context.Value("q", 0)
    fleet = _Fleet(specs, on_progress)
    try:
        with _signals_ignored():  # inherited by the children: Ctrl-C during their start must not kill them
            for spec in specs:
                fleet.start(context, spec, next_index)
        fleet.run()
    finally:
        fleet.close()
    fleet.result.records.sort(key=lambda record: (record.scheduled_s, record.request_id))
    return fleet.result


class _Fleet:
    def __init__(self, specs: list[WorkerSpec], on_progress: Callable[[float, Progress], None]) -> None:
        self.result = FleetResult()
        self._on_progress = on_progress
        self._num_warm_up = sum(len(spec.warm_up) for spec in specs)
        self._processes: list[Any] = []
        self._process_of: dict[Connection, int] = {}  # open pipes only
        self._progress: dict[int, Progress] = {}
        self._origin = float("inf")  # until the common start

    def start(self, context: Any, spec: WorkerSpec, next_index: Any) -> None:
        here, there = context.Pipe()
        process = context.Process(target=run_process, args=(spec, there, next_index), daemon=True)
        process.start()
        there.close()
        self._processes.append(process)
        self._process_of[here] = spec.process

    def run(self) -> None:
        try:
            self._await_ready()
            self._origin = time.perf_counter() + START_DELAY_S
            self._tell(("start", self._origin))
            while self._process_of:
                self._collect(timeout_s=1.0)
        except KeyboardInterrupt:
            self.result.was_interrupted = True
            self._stop()

    def _await_ready(self) -> None:
        waiting = dict(self._process_of)
        num_ok, errors = 0, []
        deadline = time.monotonic() + READY_TIMEOUT_S
        while waiting and time.monotonic() < deadline:
            for pipe in _readable(waiting, timeout_s=1.0):
                message = self._receive(pipe)
                del waiting[pipe]
                if isinstance(message, Ready):
                    num_ok += message.num_warm_up_ok
                    errors += [message.warm_up_error] if message.warm_up_error else []
        if num_ok < self._num_warm_up:
            reason = errors[0] if errors else "no answer"
            self.result.warnings.append(
                f"{self._num_warm_up - num_ok} of {self._num_warm_up} warm-up requests failed: {reason}"
            )

    def _stop(self) -> None:
        try:
            self._tell(("stop",))
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while self._process_of and time.monotonic() < deadline:
                self._collect(timeout_s=0.2)
        except KeyboardInterrupt:
            self.result.warnings.append("interrupted twice: requests in flight are not in the figures")

    def _collect(self, timeout_s: float) -> None:
        for pipe in _readable(self._process_of, timeout_s):
            message = self._receive(pipe)
            process = self._process_of.get(pipe, -1)
            if isinstance(message, Done):
                self.result.health.append(message.health)
                self._process_of.pop(pipe)
                pipe.close()
                message = message.progress
            if isinstance(message, Progress):
                self.result.records += message.records
                self._progress[process] = replace(message, records=[])
        self._on_progress(max(time.perf_counter() - self._origin, 0.0), total(self._progress))

    def _receive(self, pipe: Any) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            process = self._process_of.pop(pipe)
            self.result.warnings.append(f"client process {process} died; its requests in flight are lost")
            return None

    def _tell(self, message: tuple[Any, ...]) -> None:
        for pipe in list(self._process_of):
            try:
                pipe.send(message)
            except OSError:
                continue  # dead: found at the next receive

    def close(self) -> None:
        for pipe in self._process_of:
            pipe.close()
        for process in self._processes:
            process.join(timeout=2.0)
            if process.is_alive():
                process.kill()
                process.join()


def _readable(pipes: Iterable[Connection], timeout_s: float) -> list[Any]:
    return wait(list(pipes), timeout=timeout_s)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
