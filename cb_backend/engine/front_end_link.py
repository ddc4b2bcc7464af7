"""The engine's end of the socket to its front ends: who is connected, whose process still lives.

Messages come out decoded, malformed ones never. What they mean is the engine process's business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
import numpy as np
import zmq

from cb_backend.contracts.errors import CbError, ConfigError, ErrorCode
from cb_backend.contracts.messages import (
    EngineFailed,
    EngineMessage,
    FrontEndMessage,
    Hello,
    RequestFailed,
    decode_front_end_message,
    encode,
)
from cb_backend.contracts.queue_room import QueueRoom
from cb_backend.contracts.request import REQUEST_ID_BITS
from cb_backend.contracts.step import EngineOutput
from cb_backend.engine.step_messages import Shares, failures, step_output
from cb_backend.support.process_watch import ProcessWatch
from cb_backend.support.silence import SilenceClock

# How long a failed start waits to tell why: for the first front end, which has started the engine but may not run just
# now, and from then on for the others.
FAILED_START_FIRST_S = 60.0
FAILED_START_LINGER_S = 2.0
# An engine to which no front end has come by then is nobody's.
FIRST_FRONT_END_TIMEOUT_S = 60.0

# As numbers: with the enum's members each call would build new ones.
_NO_WAIT, _MORE_NO_WAIT, _EVENTS, _IS_READABLE = map(
    int, (zmq.NOBLOCK, zmq.SNDMORE | zmq.NOBLOCK, zmq.EVENTS, zmq.POLLIN)
)

logger = logging.getLogger("cb_backend.engine")


class FrontEnd:
    """One connected front end: its address on the socket, its process, its open requests."""

    def __init__(self, identity: bytes, hello: Hello) -> None:
        self.identity = identity
        self.front_end_id = hello.front_end_id
        self.watch = ProcessWatch(hello.pid)
        self.silence = SilenceClock()
        self.open_request_ids: set[int] = set()


class FrontEndLink:
    """The ROUTER socket and who is connected to it. Knows nothing of the engine's state."""

    def __init__(self, socket_path: str, server_pid: int) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a dropped step output would leave its requests open for ever
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a front end that connects anew keeps its name
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(f"ipc://{socket_path}")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._server = ProcessWatch(server_pid)
        self._watch(self._server)
        self.front_ends: dict[int, FrontEnd] = {}  # by front end id
        self._shares = Shares()
        self._room = QueueRoom(None)  # of the engine's queue, as last told
        self._has_heard = False  # something has come from a front end since
        self.has_had_front_end = False

    @property
    def is_server_alive(self) -> bool:
        return self._server.is_alive

    def why_over(self, seconds: float) -> str | None:
        """Why nobody will ask for anything any more, so long after the start; None: somebody may."""
        if not self.is_server_alive:
            return "the server is gone"
        if not self.front_ends and (self.has_had_front_end or seconds > FIRST_FRONT_END_TIMEOUT_S):
            return "no front end is left"
        return None

    def wait(self, timeout_ms: int) -> bool:
        """Return when a message has come or a watched process has ended (True), or when the time is over (False)."""
        return bool(self._poller.poll(timeout_ms))

    def receive(self) -> tuple[bytes, FrontEndMessage] | None:
        """The next message with its sender's identity, or None when there is none now. Malformed ones are skipped."""
        while int(self._socket.get(_EVENTS)) & _IS_READABLE:
            frames = self._socket.recv_multipart(_NO_WAIT)
            try:
                if len(frames) != 2:
                    raise msgspec.DecodeError(f"{len(frames)} frames")
                return frames[0], decode_front_end_message(frames[1])
            except msgspec.DecodeError as error:
                logger.warning("ignored a malformed message: %s", error)
        return None

    def send(self, identity: bytes, message: EngineMessage) -> None:
        frame = encode(message)
        # `send_multipart` does the same, but looks at every frame first and builds the flags anew.
        self._socket.send(identity, _MORE_NO_WAIT)
        self._socket.send(frame, _NO_WAIT)

    def send_to_all(self, message: EngineMessage) -> None:
        for front_end in self.front_ends.values():
            self.send(front_end.identity, message)

    def tell_room(self, room: QueueRoom) -> None:
        """While the queue is nearly full: how many more it takes, whenever that may not be what front ends count with.

        They count what they send, so after anything of theirs has come they are told again.
        """
        if room is self._room and not self._has_heard:
            return
        is_news = room.num_requests != self._room.num_requests or self._has_heard
        if is_news and (room.num_requests, self._room.num_requests) != (None, None):
            self.send_to_all(room)
        self._room, self._has_heard = room, False

    def send_output(self, step_id: int, output: EngineOutput, scheduled_at: dict[int, float]) -> None:
        """One message to each front end concerned; work per entry only in NumPy, and per request that ended."""
        for request_id, code, reason in failures(output):
            self.send_failure(request_id, code, reason)
        for share in self._shares.of(output):
            front_end = self.front_ends.get(share.front_end_id)
            if front_end is not None:
                self.send(front_end.identity, step_output(step_id, share, output, scheduled_at))
        if np.count_nonzero(output.finish_reasons):
            for request_id in output.request_ids[output.finish_reasons != 0].tolist():
                front_end = self.front_ends.get(request_id >> REQUEST_ID_BITS)
                if front_end is not None:
                    front_end.open_request_ids.discard(request_id)

    def send_failure(self, request_id: int, code: ErrorCode, reason: str) -> None:
        """The end of a request, with a reason. What a step's output says of it afterwards is not looked at."""
        front_end = self.front_ends.get(request_id >> REQUEST_ID_BITS)
        if front_end is not None:
            front_end.open_request_ids.discard(request_id)
            self.send(front_end.identity, RequestFailed(request_id, int(code), reason))

    def join(self, identity: bytes, hello: Hello) -> None:
        if hello.front_end_id in self.front_ends:
            return
        front_end = FrontEnd(identity, hello)
        self.front_ends[hello.front_end_id] = front_end
        self.has_had_front_end = True
        self._watch(front_end.watch)

    def leave(self, front_end_id: int) -> set[int]:
        """Forget a front end; returns its open requests."""
        front_end = self.front_ends.pop(front_end_id, None)
        if front_end is None:
            return set()
        if front_end.watch.fd is not None:
            self._poller.unregister(front_end.watch.fd)
        front_end.watch.close()
        return front_end.open_request_ids

    def sender(self, identity: bytes, request_id: int) -> FrontEnd | None:
        """The front end that may speak of this request: the one that its id names, at its own address."""
        front_end = self.front_ends.get(request_id >> REQUEST_ID_BITS)
        return front_end if front_end is not None and front_end.identity == identity else None

    def heard(self, identity: bytes) -> None:
        """A front end has given a sign of life."""
        self._has_heard = True
        for front_end in self.front_ends.values():
            if front_end.identity == identity:
                front_end.silence.heard()

    def silent_front_ends(self, limit_s: float) -> list[FrontEnd]:
        """Those with open requests from which nothing has come for so long. To be asked at least once a second."""
        for front_end in self.front_ends.values():
            if not front_end.open_request_ids:
                front_end.silence.heard()
        return [front_end for front_end in self.front_ends.values() if front_end.silence.look() > limit_s]

    def end_requests_of_silent(self, limit_s: float, cancel: Callable[[int], object]) -> None:
        """A front end that lives but does not run (stopped, stuck) must not hold blocks for ever; 0: no limit.

        It stays a member, and hears of the end of its requests when it wakes.
        """
        for front_end in self.silent_front_ends(limit_s) if limit_s else ():
            logger.error("front end %d has been silent for %.0f s; its requests end", front_end.front_end_id, limit_s)
            reason = f"the front end of this request did not run for {limit_s:g} s; send the request again"
            for request_id in front_end.open_request_ids:
                cancel(request_id)
                self.send(front_end.identity, RequestFailed(request_id, int(ErrorCode.UNAVAILABLE), reason))
            front_end.open_request_ids.clear()

    def dead_front_ends(self) -> list[int]:
        return [fid for fid, front_end in self.front_ends.items() if not front_end.watch.is_alive]

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _watch(self, watch: ProcessWatch) -> None:
        if watch.fd is not None:
            self._poller.register(watch.fd, zmq.POLLIN)


def report_failed_start(link: FrontEndLink, error: Exception) -> None:
    """Tell every front end that says hello why there is no engine, for as long as they may still be coming; and in the
    log, with where it happened unless the error says all."""
    reason = str(error) if isinstance(error, CbError) else f"{type(error).__name__}: {error}"
    logger.error("the engine cannot start: %s", reason, exc_info=None if isinstance(error, ConfigError) else error)
    reason = " ".join(reason.split())
    deadline = time.monotonic() + FAILED_START_FIRST_S
    while time.monotonic() < deadline and link.is_server_alive:
        link.wait(100)
        while (received := link.receive()) is not None:
            identity, message = received
            if isinstance(message, Hello):
                if not link.has_had_front_end:
                    deadline = time.monotonic() + FAILED_START_LINGER_S
                link.join(identity, message)
                link.send(identity, EngineFailed(reason))
