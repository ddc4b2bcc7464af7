"""Sees to it that a model copy's engine processes run, once for all of its front ends.

The first front end to own the runtime folder starts the engines (`data_parallel_size` of them) and starts each again,
with back-off, when it ends; when that front end goes, another one takes over and adopts the engines as they are. Every
front end connects its clients to whichever engines run now. How requests travel is the clients' business.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import asdict
from pathlib import Path

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.messages import ModelInfo
from cb_backend.front_end.engines.engine_client import EngineClient
from cb_backend.front_end.engines.engine_group import EngineGroup
from cb_backend.front_end.engines.engine_keeper import EngineKeeper
from cb_backend.front_end.engines.engine_launch import launch_engine
from cb_backend.front_end.engines.runtime_dir import RuntimeDir, folder_name
from cb_backend.front_end.interpreter import find_python

CHECK_INTERVAL_S = 0.1
PROGRESS_INTERVAL_S = 10.0

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
        launched: EngineConfig | None = None,
    ) -> None:
        """`base` is where runtime folders are made; None: the user's private one. `engine_model`: name and version of
        the model whose engine this is; None: the front end's own. `launched`: what an engine is started with, where
        that is more than the front ends of one engine agree on; None: `config`."""
        self.model_name, self.model_version = model_name, model_version
        self.engine_name, self.engine_version = engine_model or (model_name, model_version)
        self.config = config
        self._server_pid = server_pid
        config_json = json.dumps(asdict(config), sort_keys=True)
        launched_json = json.dumps(asdict(launched or config), sort_keys=True)
        python = config.engine_python or find_python()
        key = f"{self.engine_name}\n{self.engine_version}\n{config_json}"
        directory = self._directory = RuntimeDir(server_pid, key, base)
        directory.write_model(f"{self.engine_name} version {self.engine_version}")
        self._changed = threading.Event()
        self._is_closing = False
        clients = [
            EngineClient(directory.front_end_id, self._changed.set, config.watchdog_timeout_s)
            for _ in range(config.data_parallel_size)
        ]
        self.client = EngineGroup(directory.front_end_id, clients)
        self._keepers = [
            EngineKeeper(
                index,
                directory,
                client,
                lambda index, socket_path: launch_engine(python, config, launched_json, index, socket_path, server_pid),
            )
            for index, client in enumerate(clients)
        ]
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)

    @property
    def is_owner(self) -> bool:
        """Whether this front end is the one that looks after the engines."""
        return self._directory.is_owner

    @property
    def runtime_folder(self) -> Path:
        """Where the front ends of this model copy meet; gone once the last of them has closed."""
        return self._directory.path

    def shared_folder(self, key: str) -> Path:
        """Beside the runtime folder: of all front ends of the server that come with this key, whatever their engine. It
        is the caller's to make and to remove; what a killed server leaves is removed as runtime folders are."""
        return self.runtime_folder.parent / folder_name(self._server_pid, key)

    def start(self) -> ModelInfo:
        """Wait until this front end is connected to every engine. Raises `ConfigError` with an engine's reason."""
        self._tick()
        self._thread.start()
        begin = time.monotonic()
        next_progress = begin + PROGRESS_INTERVAL_S
        while not all(member.is_ready for member in self.client.members):
            failures = (keeper.final_failure for keeper in self._keepers if keeper.final_failure is not None)
            reason = self.client.failure or next(failures, None)
            if reason is not None:
                raise ConfigError(f"the engine cannot start: {reason}")
            if time.monotonic() >= next_progress:
                logger.info("waiting for the engine since %.0f s", time.monotonic() - begin)
                next_progress += PROGRESS_INTERVAL_S
            time.sleep(0.02)
        assert self.client.info is not None
        return self.client.info

    def close(self) -> None:
        """Leave the engines; the last front end also waits for their end and removes the runtime folder."""
        if self._is_closing:
            return
        self._is_closing = True
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.client.close()
        is_last = self._directory.leave()
        if is_last:
            for keeper in self._keepers:
                keeper.end_engine()
            self._directory.remove()
        for keeper in self._keepers:
            keeper.close()

    # ---- the supervisor's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._tick()
            except Exception:
                logger.exception("looking after the engines failed")
            self._changed.wait(CHECK_INTERVAL_S)
            self._changed.clear()

    def _tick(self) -> None:
        is_new_owner = not self._directory.is_owner and self._directory.try_own()
        for keeper in self._keepers:
            keeper.tick(is_new_owner)
