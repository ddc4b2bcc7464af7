"""Sees to it that there is one engine process for all front ends of a model copy, and that it is running.

The first front end to own the runtime folder starts the engine and starts it again, with back-off, when it ends; when
that front end goes, another one takes over and adopts the engine as it is. Every front end connects its
`EngineClient` to whichever engine runs now. How requests travel is the client's business.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import cb_backend
from cb_backend.config import EngineConfig
from cb_backend.errors import ConfigError
from cb_backend.front_end.engine_client import EngineClient
from cb_backend.front_end.runtime_dir import EngineLife, RuntimeDir
from cb_backend.messages import ModelInfo
from cb_backend.process_watch import ProcessWatch, process_start_time

CHECK_INTERVAL_S = 0.1
PROGRESS_INTERVAL_S = 10.0
FIRST_RESTART_DELAY_S = 0.5
MAX_RESTART_DELAY_S = 30.0
STEADY_AFTER_S = 60.0  # an engine that ran this long starts the back-off anew when it ends
ENGINE_EXIT_TIMEOUT_S = 15.0  # after the last goodbye

logger = logging.getLogger("cb_backend.front_end")


class EngineSupervisor:
    """One per front end. `start`, then use `client`; `close` at the end."""

    def __init__(
        self,
        config: EngineConfig,
        server_pid: int,
        model_name: str,
        model_version: str,
        base: Path | None = None,
        engine_model: tuple[str, str] | None = None,
    ) -> None:
        """`base` is where runtime folders are made; None: the user's private one. `engine_model`: name and version of
        the model whose engine this is; None: the front end's own."""
        self.model_name, self.model_version = model_name, model_version
        self.engine_name, self.engine_version = engine_model or (model_name, model_version)
        self.config = config
        self._config_json = json.dumps(asdict(config), sort_keys=True)
        self._python = config.engine_python or find_python()
        self._server_pid = server_pid
        key = f"{self.engine_name}\n{self.engine_version}\n{self._config_json}"
        self._directory = RuntimeDir(server_pid, key, base)
        self._changed = threading.Event()
        self._is_closing = False
        self._child: subprocess.Popen[bytes] | None = None
        self._watch: ProcessWatch | None = None  # of the engine that `client` was last told of
        self._watched_life: EngineLife | None = None
        self._spawn_time = 0.0
        self._num_restarts = 0  # since the engine last ran steadily
        self.final_failure: str | None = None  # why the first engine could not start
        self.client = EngineClient(self._directory.front_end_id, self._changed.set, config.watchdog_timeout_s)
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)

    @property
    def is_owner(self) -> bool:
        """Whether this front end is the one that looks after the engine."""
        return self._directory.is_owner

    def start(self) -> ModelInfo:
        """Wait until this front end is connected to a ready engine. Raises `ConfigError` with the engine's reason."""
        self._tick()
        self._thread.start()
        begin = time.monotonic()
        next_progress = begin + PROGRESS_INTERVAL_S
        while not self.client.is_ready:
            reason = self.client.failure or self.final_failure
            if reason is not None:
                raise ConfigError(f"the engine cannot start: {reason}")
            if time.monotonic() >= next_progress:
                logger.info("waiting for the engine since %.0f s", time.monotonic() - begin)
                next_progress += PROGRESS_INTERVAL_S
            time.sleep(0.02)
        assert self.client.info is not None
        return self.client.info

    def close(self) -> None:
        """Leave the engine; the last front end also waits for its end and removes the runtime folder."""
        if self._is_closing:
            return
        self._is_closing = True
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.client.close()
        is_last = self._directory.leave()
        if is_last:
            self._end_engine()
            self._directory.remove()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    # ---- the supervisor's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._tick()
            except Exception:
                logger.exception("looking after the engine failed")
            self._changed.wait(CHECK_INTERVAL_S)
            self._changed.clear()

    def _tick(self) -> None:
        """Notice what has changed and do the next thing about it; returns at once."""
        is_new_owner = not self._directory.is_owner and self._directory.try_own()
        life = self._directory.engine()
        if life is not None and life != self._watched_life:
            self._follow(life)
        if self._watch is not None and self._watch.is_alive:
            return
        if self._child is not None and self._child.poll() is None:
            return
        if self._directory.is_owner and self.final_failure is None:
            self._replace_engine(is_new_owner)

    def _follow(self, life: EngineLife) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = ProcessWatch(life.pid, life.start_time)
        self._watched_life = life
        if self._watch.is_alive:
            self.client.connect(life)

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
        delay = min(FIRST_RESTART_DELAY_S * 2**self._num_restarts, MAX_RESTART_DELAY_S)
        self._num_restarts += 1
        self._spawn_time = now + delay
        logger.error("the engine ended with exit code %d; it is started again in %.1f s", exit_code, delay)

    def _spawn(self) -> None:
        socket_path = self._directory.new_socket_path()
        module = "cb_backend.engine.engine_process"
        command = [self._python, "-m", module, "--socket", socket_path, "--server-pid", str(self._server_pid)]
        self._spawn_time = time.monotonic()
        try:
            self._child = subprocess.Popen(
                [*command, "--config-json", self._config_json],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the server's log
                stderr=2,
                close_fds=True,
                start_new_session=True,  # out of reach of the terminal's Ctrl-C: the server decides when to end
                env=engine_environment(),
            )
        except OSError as error:
            raise ConfigError(
                f"the engine's interpreter {self._python} cannot be started ({error.strerror}); set engine_python in"
                " model.json to one that can"
            ) from None
        pid = self._child.pid
        life = EngineLife(pid, process_start_time(pid) or 0, socket_path)
        self._directory.write_engine(life)
        logger.info("started the engine process %d", pid)
        self._follow(life)

    def _end_engine(self) -> None:
        """Nobody is left: wait for the engine to end by itself, then make it."""
        life = self._directory.engine()
        if life is None:
            return
        watch = ProcessWatch(life.pid, life.start_time)
        if self.client.info is not None:
            _wait_for_end(watch, ENGINE_EXIT_TIMEOUT_S)  # it has heard the last goodbye
        for number in (signal.SIGTERM, signal.SIGKILL):
            if watch.is_alive:
                os.kill(life.pid, number)
                _wait_for_end(watch, 3.0)
        watch.close()
        if self._child is not None:
            self._child.wait()
            self._child = None


def find_python() -> str:
    """An interpreter like the one this code runs in; in the server's stub `sys.executable` need not be one."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [
        sys.executable,
        os.path.join(sys.prefix, "bin", version),
        os.path.join(sys.prefix, "bin", "python3"),
        shutil.which(version),
        getattr(sys, "_base_executable", None),
        shutil.which("python3"),
    ]
    for candidate in candidates:
        if candidate and os.path.basename(candidate).startswith("python") and os.access(candidate, os.X_OK):
            return candidate
    raise ConfigError("no Python interpreter found for the engine process; set engine_python in model.json")


def engine_environment() -> dict[str, str]:
    """The environment of the engine process: ours, waiting threads that sleep, and this package importable.

    From an installed package nothing is added: another `engine_python` must not see this interpreter's site-packages.
    """
    environment = dict(os.environ)
    # On a CPU, threads that wait for each other must sleep: where spinning ones share cores with others (2 cores, load
    # 9), a decode step of the demo model took 7 s instead of 0.9 s.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    root = Path(cb_backend.__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH")]))
    return environment


def _wait_for_end(watch: ProcessWatch, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while watch.is_alive and time.monotonic() < deadline:
        time.sleep(0.02)
