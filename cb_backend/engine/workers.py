"""Processes of an engine's other ranks: how they are started, watched and ended. What they compute is not known here.

They end with the process that started them, however that ends, and are ended by force: one of them may wait on its
device for a rank that is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.rank_faults import first_fault
from cb_backend.parallel.hand_over import new_connection
from cb_backend.support.child_environment import child_environment
from cb_backend.support.process_watch import ProcessWatch

WORKER_MODULE = "cb_backend.engine.worker_process"
RING_FILE = "plans"
ARRIVE_TIMEOUT_S = 300.0  # for a process to import torch, on a host where everything is read for the first time
_POLL_S = 0.02
_ENDING_S = 1.0  # from the end of a process's connections to its own

Result = TypeVar("Result")


class WorkersLostError(Exception):
    """A rank of the engine is gone or cannot go on: none of the others can."""


class Workers:
    """Ranks 1 to `size` - 1. `folder` is new, and theirs: they meet rank 0 in it. `forget_folder` removes it."""

    def __init__(self, config: EngineConfig, parent: Path | None = None) -> None:
        """parent: in which `folder` is made; None: where temporary files are."""
        self.size = config.tensor_parallel_size
        self.folder = Path(tempfile.mkdtemp(prefix="cb_backend_ranks_", dir=parent))
        self.connections: dict[int, socket.socket] = {}  # for hand-overs, by rank, where ranks take adapters
        self._has_connections = config.enable_lora
        self._config_json = json.dumps(asdict(config))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._is_ending = False

    def start(self) -> None:
        """They import torch and come to the folder. Raises `ConfigError` where a process cannot be started."""
        try:
            for rank in range(1, self.size):
                self._processes[rank] = self._start(rank)
        except OSError as error:
            raise ConfigError(
                f"the process of a rank cannot be started ({error.strerror}); lower tensor_parallel_size"
            ) from None

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", WORKER_MODULE, "--folder", str(self.folder), "--rank", str(rank)]
        command += ["--parent-pid", str(os.getpid()), "--config-json", self._config_json]
        with contextlib.ExitStack() as given:
            inherited = []
            if self._has_connections:
                self.connections[rank], end = new_connection()
                given.enter_context(end)  # the process's own from now on
                inherited = [end.fileno()]
                command += ["--connection", str(end.fileno())]
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                stderr=2,
                env={**child_environment(), "OMP_NUM_THREADS": str(threads_of_rank(self.size))},
                pass_fds=inherited,
            )

    @property
    def pids(self) -> dict[int, int]:
        """By rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def lost(self) -> str | None:
        """What has become of a rank that is gone; None: all of them live. Of several one that was killed: others end by
        themselves because of it."""
        ended = [(code, rank) for rank, code in self._codes().items() if code is not None]
        if not ended:
            return None
        code, rank = min(ended)
        how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
        return f"rank {rank} (process {self._processes[rank].pid}) has ended {how}"

    def _codes(self) -> dict[int, int | None]:
        """Exit codes by rank; None: it lives; below 0: it was killed."""
        return {rank: process.poll() for rank, process in self._processes.items()}

    def lost_soon(self) -> str | None:
        """The same where something has failed, perhaps because of it: a connection may end before its process has."""
        give_up_at = time.monotonic() + _ENDING_S
        while (lost := self.lost()) is None and time.monotonic() < give_up_at:
            time.sleep(_POLL_S)
        return lost

    def why_lost(self) -> Exception | None:
        """What to raise where something has failed while all load, perhaps because of one of them; None: all live."""
        lost = self.lost_soon()
        fault = first_fault(self.folder)
        if fault is not None and all((code or 0) >= 0 for code in self._codes().values()):
            return fault
        if lost is None:
            return None
        return RuntimeError(f"{lost} while the model was loaded; its reason is above in the log")

    def while_they_live(self, call: Callable[[], Result]) -> Result:
        """What a call returns that waits for all of them, and cannot see that one has ended. Raises `WorkersLostError`
        where that is so; the call then stays in its thread."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="meet-ranks", daemon=True).start()
        while not wait([future], _POLL_S).done:
            self.check()
        return future.result()

    def wait_until_here(self) -> None:
        """Return when all are about to meet. Raises `WorkersLostError` where one ends first, or does not come."""
        give_up_at = time.monotonic() + ARRIVE_TIMEOUT_S
        missing = set(self._processes)
        while missing:
            self.check()
            missing = {rank for rank in missing if not arrival(self.folder, rank).exists()}
            if missing and time.monotonic() > give_up_at:
                raise WorkersLostError(f"ranks {sorted(missing)} have not started within {ARRIVE_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raises `WorkersLostError` where a rank is gone."""
        lost = self.lost()
        if lost is not None:
            raise WorkersLostError(lost)

    def call_when_lost(self, on_lost: Callable[[], None]) -> None:
        """Call it from another thread as soon as one of them has ended by itself; perhaps once for each."""

        def tell(watch: ProcessWatch) -> None:
            watch.close()
            if not self._is_ending:
                on_lost()

        for rank, process in self._processes.items():
            watch = ProcessWatch(process.pid)
            watch.call_at_end(partial(tell, watch), f"rank-{rank}-watch")

    def tidy_folder(self) -> None:
        """All have loaded: nobody but torch looks at what is in it any more, at its file of the ranks."""
        for path in (self.folder / RING_FILE, *self.folder.glob("rank*.*")):
            path.unlink(missing_ok=True)

    def forget_folder(self) -> None:
        """To be called when the group has been left: torch looks into its file of the ranks as long as it is there."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def end(self) -> None:
        """End them at once. May be called again."""
        self._is_ending = True
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes.values():
            process.wait()
        for connection in self.connections.values():
            connection.close()


def arrival(folder: Path, rank: int) -> Path:
    """The file by which a rank says that it is there."""
    return folder / f"rank{rank}.here"


def threads_of_rank(size: int) -> int:
    """Of torch, on a CPU: as told by the environment, or a part of the cores each."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() and int(told) else max(1, len(os.sched_getaffinity(0)) // size)
