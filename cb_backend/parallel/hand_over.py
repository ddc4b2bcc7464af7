"""Memory that rank 0 hands to the other ranks while steps run, beside the plans: whole, once, and never through a pipe.

It has no name, so nothing of it is left by ranks that are killed: each rank gets a descriptor over a socket of its own,
maps the memory, takes what it needs of it, and says that it has, or why it could not. Labels tell hand-overs apart.
This module does not know what is handed over, and never imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

LABEL_BYTES = 8
TAKE_TIMEOUT_S = 60.0  # a rank that needs longer is not waited for; whether it stands still is others' to watch
# As a `ConnectionError`: nobody is at the other end, or this one is closed because the ranks end. All else is our own
# trouble.
_GONE = (errno.ENOTCONN, errno.ESRCH, errno.EBADF)
_MOST_TEXT = 4096  # bytes of a message: a label, and in an answer why it was not taken

Take = Callable[[bytes, mmap.mmap], None]
logger = logging.getLogger("cb_backend.worker")


class NotTakenError(Exception):
    """A rank has not taken what was handed to it; the others may have."""


def new_memory(num_bytes: int) -> tuple[int, mmap.mmap]:
    """(a descriptor, which is the caller's to close, the memory: zeros). Raises `MemoryError`."""
    descriptor = os.memfd_create("cb_backend")
    try:
        os.ftruncate(descriptor, num_bytes)  # NOTE: no fallocate, which does not say that memory ends before it has
        return descriptor, mmap.mmap(descriptor, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise MemoryError(f"{num_bytes} bytes to share with other processes: {error.strerror}") from None


def new_connection() -> tuple[socket.socket, socket.socket]:
    """(rank 0's end, the other rank's)."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Giver:
    """Rank 0's side. Any thread may give."""

    def __init__(self, ends: Mapping[int, socket.socket], timeout_s: float = TAKE_TIMEOUT_S) -> None:
        """The ends of the connections, by the rank at the other end. They become the giver's."""
        self._ends = dict(ends)
        self._lock = threading.Lock()  # one hand-over at a time
        for end in self._ends.values():
            end.settimeout(timeout_s)
        self._timeout_s = timeout_s

    def give(self, label: bytes, descriptor: int) -> None:
        """Returns when every rank has taken the memory. Raises `NotTakenError` where one has not."""
        faults: list[str] = []
        has_got: dict[int, socket.socket] = {}  # nobody else will answer
        with self._lock:
            for rank, end in self._ends.items():
                with self._failing(rank, faults):
                    socket.send_fds(end, [label], [descriptor])
                    has_got[rank] = end
            for rank, end in has_got.items():
                with self._failing(rank, faults):
                    fault = _answer(end, label)
                    if fault:
                        faults.append(f"rank {rank} could not take it: {fault}")
        if faults:
            raise NotTakenError("; ".join(dict.fromkeys(faults)))

    @contextlib.contextmanager
    def _failing(self, rank: int, faults: list[str]) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            faults.append(f"rank {rank} has not taken it within {self._timeout_s:g} s")
        except OSError as error:
            is_gone = isinstance(error, ConnectionError) or error.errno in _GONE
            what = "is gone" if is_gone else f"could not be reached: {error.strerror or error}"
            faults.append(f"rank {rank} {what}")

    def close(self) -> None:
        """Who waits for an answer waits no longer."""
        for end in self._ends.values():
            with contextlib.suppress(OSError):  # the other one is gone
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for end in self._ends.values():
                end.close()


def _answer(end: socket.socket, label: bytes) -> str:
    """Why the memory of this label was not taken; empty: it was. Answers that came too late are passed over."""
    while True:
        message = end.recv(_MOST_TEXT)
        if not message:
            raise ConnectionResetError
        if message[:LABEL_BYTES] == label:
            return message[LABEL_BYTES:].decode(errors="replace")


def take_all(end: socket.socket, take: Take) -> None:
    """Another rank's side: `take` is called with each label and its memory, which is this process's for as long as
    somebody refers to it. What it raises is the answer. Returns when rank 0 is gone."""
    with end, contextlib.suppress(ConnectionError):
        while True:
            label, descriptors, _, _ = socket.recv_fds(end, LABEL_BYTES, 1)
            if not label:
                return
            end.send(label + _taken(label, descriptors, take).encode()[: _MOST_TEXT - LABEL_BYTES])


def _taken(label: bytes, descriptors: list[int], take: Take) -> str:
    """Why it was not; empty: it was."""
    if not descriptors:
        return "it came without its memory; raise the limit of open files"
    try:
        try:
            memory = mmap.mmap(descriptors[0], 0)
        finally:
            os.close(descriptors[0])
        take(label, memory)
    except Exception as error:
        logger.exception("what rank 0 handed over could not be taken")
        return f"{type(error).__name__}: {error}"
    return ""
