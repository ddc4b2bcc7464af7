"""Whether another process still lives (a pidfd where there are any, /proc otherwise), and how this one surely ends.

Front ends, the engine and the server watch one another by this. It does not know what any of them do.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Callable

POLL_INTERVAL_S = 0.25  # where pidfds are missing


def process_start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of `pid`, or None if there is no such process.

    With the pid it names a process for good.
    """
    fields = process_stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def process_cpu_seconds(pid: int) -> float | None:
    """What all threads of `pid` have computed until now, or None if there is no such process."""
    fields = process_stat(pid)
    return None if fields is None else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_stat(pid: int) -> list[str] | None:
    """The fields of `/proc/PID/stat` from the state on (proc(5)'s number 3), or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].decode().split() or None  # a name may hold anything
    except OSError:
        return None


def end_within(seconds: float) -> None:
    """From now on this process ends within so many seconds, whatever its threads do; returns at once.

    Nothing that Python runs is needed for that: another thread may hold the interpreter's lock for ever, and a log that
    nobody reads may hold whoever writes to it. Halfway the log is told where all threads stand.
    """
    with contextlib.suppress(Exception):  # the end does not depend on it
        faulthandler.dump_traceback_later(seconds / 2, file=2)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, seconds)  # nobody handles its signal, so the kernel ends the process


class ProcessWatch:
    """Tells when one process has ended, even as an unreaped zombie. Close it when done.

    `fd` becomes readable at the end of the process, for pollers; it is None where pidfds are missing.
    """

    def __init__(self, pid: int, start_time: int | None = None) -> None:
        """`start_time` (of `process_start_time`) tells a process from a later one that got the same pid."""
        self.pid = pid
        self.fd: int | None = None
        self._is_gone = False
        try:
            self.fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._is_gone = True
        except (AttributeError, OSError):
            self.fd = None
        self._start_time = process_start_time(pid)
        if self._start_time is None or (start_time is not None and start_time != self._start_time):
            self._is_gone = True

    @property
    def is_alive(self) -> bool:
        if not self._is_gone:
            self._is_gone = not self._ask()
        return not self._is_gone

    def wait(self) -> None:
        """Return when the process has ended."""
        while self.is_alive:
            if self.fd is not None:
                poller = select.poll()
                poller.register(self.fd, select.POLLIN)
                poller.poll()
            else:
                time.sleep(POLL_INTERVAL_S)

    def call_at_end(self, on_end: Callable[[], None], name: str) -> threading.Thread:
        """Call `on_end` from a thread of that name as soon as the process has ended. The watch must stay open."""
        thread = threading.Thread(target=self._wait_and_call, args=(on_end,), name=name, daemon=True)
        thread.start()
        return thread

    def _wait_and_call(self, on_end: Callable[[], None]) -> None:
        self.wait()
        on_end()

    def _ask(self) -> bool:
        if self.fd is not None:
            poller = select.poll()
            poller.register(self.fd, select.POLLIN)
            return not poller.poll(0)
        return process_start_time(self.pid) == self._start_time

    def kill(self) -> None:
        """End the watched process at once."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """To the watched process if it still lives; to nobody else, whoever has its pid by now."""
        with contextlib.suppress(ProcessLookupError):
            if self.fd is not None:
                signal.pidfd_send_signal(self.fd, number)
            elif self.is_alive:
                os.kill(self.pid, number)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def machine_cpu_seconds() -> tuple[float, float] | None:
    """(busy, total) CPU seconds of this machine since its start; None where /proc/stat does not exist."""
    try:
        with open("/proc/stat", encoding="ascii") as stat:
            values = [int(value) for value in stat.readline().split()[1:9]]
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    idle = values[3] + values[4]  # idle and iowait
    return (sum(values) - idle) / ticks, sum(values) / ticks
