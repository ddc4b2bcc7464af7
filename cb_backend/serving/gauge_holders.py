"""Which front ends of one server hold which gauges under the same labels, and whose figures count.

Front ends of two generations of a model (a load over a load), or of two models of one engine, make metrics of the same
names and labels. Server 24.10 frees such a metric as soon as one of them gives it back, and a later message about it
writes to freed memory, which ends the server. So each front end notes in a folder what it holds before it makes it, in
a file that it keeps locked, and gives back only what nobody else holds. Everything happens under a lock of the folder,
which is waited for only in `leaving`. What a gauge means is not known here.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from cb_backend.front_end.engines.runtime_dir import try_lock

DOOR = "door"
LEAVE_TIMEOUT_S = 2.0
_PAUSE_S = 0.005

logger = logging.getLogger("cb_backend.serving")


class GaugeHolders:
    """This front end among them. Not thread-safe."""

    def __init__(self, folder: Path, generation: str) -> None:
        """`folder`: of one server and one set of labels; made when first needed. `generation`: a word without dots,
        the same for front ends whose figures are of the same engines."""
        self._folder = folder
        self._generation = generation
        self._file: Path | None = None
        self._fd = -1
        self._is_speaker = False
        self._keys: set[str] = set()
        self._has_warned = False

    def is_speaker(self) -> bool:
        """Whether the gauges are to show this front end's figures: the generation of whoever has come last speaks."""
        with self._door() as is_open:
            if is_open and self._join():
                newest = max(self._others() | {self._own_name()})
                self._is_speaker = newest.split(".")[1] == self._generation
        return self._is_speaker

    def note(self, key: str) -> bool:
        """Note a gauge that is about to be made. False: it cannot be noted now, so it must not be made."""
        if key in self._keys:
            return True
        with self._door() as is_open:
            if not (is_open and self._join()):
                return False
            try:
                os.write(self._fd, f"{key}\n".encode())
            except OSError as error:
                self._warn(error)
                return False
            self._keys.add(key)
            return True

    @contextlib.contextmanager
    def dropping(self, key: str) -> Iterator[bool]:
        """Hold one gauge no longer. Gives whether it may be given back while the context lasts. False: another front
        end holds it too, or that cannot be told now, and it is held on."""
        with self._door() as is_open:
            is_alone = is_open and key in self._keys and key not in self._held_by_others()
            yield is_alone
            if is_alone:
                self._keys.discard(key)
                os.ftruncate(self._fd, 0)
                os.write(self._fd, "".join(f"{each}\n" for each in sorted(self._keys)).encode())

    @contextlib.contextmanager
    def leaving(self) -> Iterator[frozenset[str]]:
        """For good. Gives the keys that may be given back while the context lasts: those that nobody else holds."""
        if self._file is None:
            yield frozenset()
            return
        with contextlib.ExitStack() as stack:
            is_open = self._wait_for_door(stack)
            yield frozenset(self._keys - self._held_by_others()) if is_open else frozenset()
            self._file.unlink(missing_ok=True)
            os.close(self._fd)
            self._file = None
            if is_open and not self._others():
                self._remove_folder()

    def _wait_for_door(self, stack: contextlib.ExitStack) -> bool:
        """Keep the folder's lock for as long as `stack` lasts. False if it could not be had in time."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.ExitStack() as attempt:
                if attempt.enter_context(self._door()):
                    stack.push(attempt.pop_all())
                    return True
            time.sleep(_PAUSE_S)
        return False

    # ---- under the folder's lock --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _door(self) -> Iterator[bool]:
        """The folder's lock for as long as the context lasts; False where somebody else has it."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(self._folder / DOOR, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:  # FileNotFoundError: the last to leave has removed it just now
            if not isinstance(error, FileNotFoundError):
                self._warn(error)
            yield False
            return
        try:
            yield try_lock(fd, fcntl.LOCK_EX) and _is_at(fd, self._folder / DOOR)
        finally:
            os.close(fd)

    def _join(self) -> bool:
        if self._file is not None:
            return True
        file = self._folder / f"{time.monotonic_ns():020d}.{self._generation}.{os.getpid()}"
        try:
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._warn(error)
            return False
        try_lock(self._fd, fcntl.LOCK_EX)  # nobody else opens it but under the folder's lock
        self._file = file
        return True

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("the gauges of this model are not published: %s cannot be used: %s", self._folder, error)

    def _own_name(self) -> str:
        assert self._file is not None, "joined"
        return self._file.name

    def _others(self) -> set[str]:
        """Names of the files of other front ends that live. Those of the dead are removed."""
        names = {path.name for path in self._folder.iterdir()} - {DOOR}
        if self._file is not None:
            names.discard(self._file.name)
        return {name for name in names if not self._is_dead(self._folder / name)}

    @staticmethod
    def _is_dead(file: Path) -> bool:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            is_dead = try_lock(fd, fcntl.LOCK_SH)
            if is_dead:
                file.unlink(missing_ok=True)
            return is_dead
        finally:
            os.close(fd)

    def _held_by_others(self) -> set[str]:
        return {key for name in self._others() for key in (self._folder / name).read_text().splitlines()}

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):
            (self._folder / DOOR).unlink()
            self._folder.rmdir()


def _is_at(fd: int, path: Path) -> bool:
    """Whether this file is still the one at the path."""
    try:
        return os.fstat(fd).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
