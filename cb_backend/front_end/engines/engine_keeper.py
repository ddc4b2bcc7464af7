"""Keeps one engine process running, and its client connected to it. One of these an engine and front end.

Where this front end is the owner, an engine that has ended is started again, with back-off. The owner's thread calls
`tick` again and again; each call does the next thing and returns at once.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Callable

from cb_backend.front_end.engines.engine_client import EngineClient
from cb_backend.front_end.engines.runtime_dir import EngineLife, RuntimeDir
from cb_backend.support.process_watch import ProcessWatch, process_start_time

FIRST_RESTART_DELAY_S = 0.5
MAX_DELAY_AFTER_START_S = 30.0  # it died before it was ready: it will probably do so again
MAX_DELAY_AFTER_SERVING_S = 4.0  # it was ready: what it died of is gone with it, and its start takes seconds anyway
STEADY_AFTER_S = 60.0  # an engine that ran this long starts the back-off anew when it ends
ENGINE_EXIT_TIMEOUT_S = 15.0  # after the last goodbye

logger = logging.getLogger("cb_backend.front_end")

# Starts engine `index` at a socket's path.
Launch = Callable[[int, str], "subprocess.Popen[bytes]"]


class EngineKeeper:
    """Not thread-safe: the supervisor calls everything."""

    def __init__(self, index: int, directory: RuntimeDir, client: EngineClient, launch: Launch) -> None:
        """`index` counts the engines of one model copy from 0."""
        self.index = index
        self.client = client
        self.final_failure: str | None = None  # why the first engine could not start
        self._directory = directory
        self._launch = launch
        self._child: subprocess.Popen[bytes] | None = None
        self._watch: ProcessWatch | None = None  # of the engine that was last seen to run
        self._watched_life: EngineLife | None = None
        self._told_life: EngineLife | None = None  # the one that `client` was last told of
        self._spawn_time = 0.0
        self._num_restarts = 0  # since the engine last ran steadily

    def tick(self, is_new_owner: bool) -> None:
        """Notice what has changed and do the next thing about it."""
        life = self._directory.engine(self.index)
        if life is not None and life != self._watched_life:
            self._follow(life)
        if self._watch is not None and self._watch.is_alive:
            return
        if self._child is not None and self._child.poll() is None:
            return
        if self._told_life is not None and self.client.ended_life != self._told_life:
            return  # the client is about to hear the engine's last words: why it has ended
        if self._directory.is_owner and self.final_failure is None:
            self._replace_engine(is_new_owner)

    def end_engine(self) -> None:
        """Nobody is left, and `client` is closed: wait for the engine to end by itself, then make it."""
        life = self._directory.engine(self.index)
        if life is None:
            return
        watch = ProcessWatch(life.pid, life.start_time)
        if self.client.has_said_goodbye and self.client.life == life:  # else it waits for front ends to come
            _wait_for_end(watch, ENGINE_EXIT_TIMEOUT_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if watch.is_alive:
                watch.send_signal(number)
                _wait_for_end(watch, 3.0)
        watch.close()
        if self._child is not None:
            self._child.wait()
            self._child = None

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _follow(self, life: EngineLife) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = ProcessWatch(life.pid, life.start_time)
        self._watched_life = life
        if self._watch.is_alive:
            self.client.connect(life)
            self._told_life = life

    def _replace_engine(self, is_new_owner: bool) -> None:
        """Start an engine where none is; after a crash, once the back-off time is over."""
        if self._child is not None:
            exit_code = self._child.wait()
            self._child = None
            self._note_end(exit_code)
            if self.final_failure is not None:
                return
        elif is_new_owner:
            self._spawn()
            return
        if time.monotonic() >= self._spawn_time:
            self._spawn()

    def _note_end(self, exit_code: int) -> None:
        """Decide whether and when an engine that has ended is started again.

        One that was serving is, whatever the reason: a device whose memory is taken or a disk that is away may be back.
        """
        now = time.monotonic()
        if self.client.info is None:  # nobody is being served yet: the load of the model fails with the reason
            self.final_failure = self.client.failure or (
                f"the engine process ended with exit code {exit_code} before it was ready; "
                "its output in the server's log says why"
            )
            return
        if now - self._spawn_time >= STEADY_AFTER_S:
            self._num_restarts = 0
        has_served = self.client.ready_life == self._watched_life
        longest = MAX_DELAY_AFTER_SERVING_S if has_served else MAX_DELAY_AFTER_START_S
        delay = min(FIRST_RESTART_DELAY_S * 2**self._num_restarts, longest)
        self._num_restarts += 1
        self._spawn_time = now + delay
        logger.error("engine %d ended with exit code %d; it is started again in %.1f s", self.index, exit_code, delay)

    def _spawn(self) -> None:
        socket_path = self._directory.new_socket_path()
        self._spawn_time = time.monotonic()
        self._child = self._launch(self.index, socket_path)
        pid = self._child.pid
        life = EngineLife(pid, process_start_time(pid) or 0, socket_path)
        self._directory.write_engine(life, self.index)
        logger.info("started engine %d, process %d", self.index, pid)
        self._follow(life)


def _wait_for_end(watch: ProcessWatch, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while watch.is_alive and time.monotonic() < deadline:
        time.sleep(0.02)
