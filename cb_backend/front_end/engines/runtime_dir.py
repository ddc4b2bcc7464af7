"""The folder in which the front ends of one model copy in one server find each other and their engines.

It holds sockets and small files: `owner` (locked by the front end that looks after the engines), `members` (locked,
shared, by every front end), `next_id` (a counter), `model` (what people call it) and an `engine-<index>.json` for each
engine (the process that runs now). The folder's name begins with the server's pid and start time, so that what a killed
server left behind can be told and removed. It does not know what an engine is or how it is started.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.rest import WEIGHTS_FILE
from cb_backend.support.process_watch import process_start_time
from cb_backend.support.shared_regions import end_stubs
from cb_backend.support.whole_files import read_if_there, write_whole

MAX_SOCKET_PATH = 100  # the kernel's limit for a socket's path is 107 bytes


@dataclass(frozen=True, slots=True)
class EngineLife:
    """One run of the engine process. A restarted engine has another socket, so nothing stale can reach it."""

    pid: int
    start_time: int  # process_watch.process_start_time
    socket_path: str

    @property
    def folder(self) -> Path:
        """The runtime folder, which all engines of one model copy share."""
        return Path(self.socket_path).parent


def runtime_base() -> Path:
    """The user's private folder for all servers. Raises `ConfigError` if somebody else owns it."""
    roots = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    for root in filter(None, roots):
        base = Path(root) / f"cb_backend-{os.getuid()}"
        # Server, engine and commands may each have another encoding of file names.
        if not str(base).isascii() or len(str(base)) > MAX_SOCKET_PATH - 50 or not os.access(root, os.W_OK):
            continue
        base.mkdir(mode=0o700, exist_ok=True)
        info = base.lstat()
        if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode):
            raise ConfigError(f"{base} belongs to another user; remove it or set XDG_RUNTIME_DIR")
        base.chmod(0o700)
        return base
    raise ConfigError("no writable folder for the engine's socket; set XDG_RUNTIME_DIR to one with a short path")


class RuntimeDir:
    """This front end's view of the folder. Not thread-safe: one owner calls everything."""

    def __init__(self, server_pid: int, key: str, base: Path | None = None) -> None:
        """`key` names the model copy: name, version and engine arguments. Joins (and creates) the folder."""
        base = base or runtime_base()
        remove_leftovers(base)
        self.path = base / folder_name(server_pid, key)
        self._owner_fd: int | None = None
        self._members_fd = self._join()
        self.front_end_id = self._take_id()

    @property
    def is_owner(self) -> bool:
        return self._owner_fd is not None

    def try_own(self) -> bool:
        """Become the owner unless another front end is. True if this one is the owner now."""
        if self._owner_fd is None:
            fd = _open(self.path / "owner")
            if try_lock(fd, fcntl.LOCK_EX):
                self._owner_fd = fd
            else:
                os.close(fd)
        return self.is_owner

    def engine(self, index: int = 0) -> EngineLife | None:
        """The engine of this index that was written down last; it may have ended since."""
        return _read_engine(self.path / f"engine-{index}.json")

    def write_engine(self, life: EngineLife, index: int = 0) -> None:
        write_whole(self.path / f"engine-{index}.json", json.dumps(asdict(life)))

    def write_model(self, name: str) -> None:
        """What people call this model copy."""
        write_whole(self.path / "model", name)

    def new_socket_path(self) -> str:
        """A path that no engine has used before."""
        return str(self.path / f"{time.monotonic_ns():x}.sock")

    def leave(self) -> bool:
        """Give up membership. True if no other front end is a member, so that the caller must clean up."""
        is_last = try_lock(self._members_fd, fcntl.LOCK_EX)
        if not is_last:
            self.close()
        return is_last

    def close(self) -> None:
        """Let go of all locks."""
        for fd in (self._owner_fd, self._members_fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._owner_fd, self._members_fd = None, -1

    def remove(self) -> None:
        """Remove the folder; only the last member (see `leave`) may."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def _join(self) -> int:
        """Take the shared lock on a folder that is still there once the lock is held."""
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            try:
                fd = _open(self.path / "members")
            except FileNotFoundError:
                continue  # removed by the last member just now
            fcntl.flock(fd, fcntl.LOCK_SH)
            try:
                if os.fstat(fd).st_ino == (self.path / "members").stat().st_ino:
                    return fd
            except FileNotFoundError:
                pass
            os.close(fd)

    def _take_id(self) -> int:
        fd = _open(self.path / "next_id")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            front_end_id = int(os.pread(fd, 20, 0) or b"1")
            os.pwrite(fd, str(front_end_id + 1).encode(), 0)
            return front_end_id
        finally:
            os.close(fd)


def folder_name(server_pid: int, key: str) -> str:
    """Of what the front ends of a server share under this key; `remove_leftovers` knows it by its beginning."""
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return f"{server_pid}-{process_start_time(server_pid) or 0}-{digest}"


def read_engines(folder: Path) -> list[EngineLife]:
    """The engines written down last in a runtime folder."""
    return [life for file in sorted(folder.glob("engine-*.json")) if (life := _read_engine(file)) is not None]


def read_model(folder: Path) -> str:
    """What people call the model copy of a runtime folder; empty where that is not known."""
    return read_if_there(folder / "model")


def read_weights(folder: Path) -> str:
    """The folder of the weights that an update has brought to the engines of a runtime folder; empty: none has."""
    return read_if_there(folder / WEIGHTS_FILE)


def model_name(copy: str) -> str:
    """Of a model copy as `read_model` names it, without its version."""
    return copy.partition(" version ")[0]


def server_pid_of(folder: Path) -> int:
    """The server whose runtime folder this is."""
    return _server_of(folder)[0]


def _server_of(folder: Path) -> tuple[int, int]:
    """Pid and start time, by which the name of its runtime folder begins. Raises `ValueError` for any other folder."""
    pid, _, rest = folder.name.partition("-")
    start_time = rest.partition("-")[0]
    if not (pid.isdigit() and start_time.isdigit()):
        raise ValueError(f"{folder} is not the runtime folder of a server")
    return int(pid), int(start_time)


def _read_engine(file: Path) -> EngineLife | None:
    try:
        return EngineLife(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def remove_leftovers(base: Path) -> None:
    """Remove the folders of servers that are gone, and first what these have left beside."""
    for folder in base.iterdir():
        try:
            pid, start_time = _server_of(folder)
        except ValueError:  # another's
            continue
        if (process_start_time(pid) or 0) != start_time:
            end_stubs(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(fd: int, kind: int) -> bool:
    """Lock an open file as `fcntl.flock` does; False where another holds it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
