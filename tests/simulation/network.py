"""The socket between front ends and an engine process, without a network: frames in lists.

The real ends talk over it: `FrontEndLink` of the engine and the parts of `EngineClient` that are not its thread.
"""

from __future__ import annotations

from collections import deque
from unittest.mock import patch

import zmq

from cb_backend.contracts.messages import Hello, encode
from cb_backend.contracts.queue_room import QueueRoom
from cb_backend.engine import front_end_link
from cb_backend.engine.front_end_link import FrontEndLink
from cb_backend.engine.step_messages import Shares
from cb_backend.front_end.engines.engine_client import EngineClient


class Wires:
    """What is on its way to one engine life, and from it."""

    def __init__(self) -> None:
        self.to_engine: deque[tuple[bytes, bytes]] = deque()  # (who sends, frame)
        self.to_front_end: dict[bytes, deque[bytes]] = {}


class _RouterEnd:
    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._receiver: bytes | None = None  # of the message whose first frame has been given

    def get(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLIN if self._wires.to_engine else 0

    def recv_multipart(self, _flags: int) -> tuple[bytes, bytes]:
        return self._wires.to_engine.popleft()

    def send(self, frame: bytes, flags: int) -> None:
        if flags & zmq.SNDMORE:
            assert self._receiver is None
            self._receiver = frame
            return
        receiver, self._receiver = self._receiver, None
        assert receiver is not None
        if receiver in self._wires.to_front_end:
            self._wires.to_front_end[receiver].append(frame)


class DealerEnd:
    def __init__(self, wires: Wires, identity: bytes) -> None:
        self._wires, self._identity = wires, identity
        wires.to_front_end[identity] = deque()

    def send(self, frame: bytes, _flags: int) -> None:
        self._wires.to_engine.append((self._identity, frame))

    def get(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLIN if self._wires.to_front_end[self._identity] else 0

    def recv(self, _flags: int) -> bytes:
        return self._wires.to_front_end[self._identity].popleft()

    def close(self, linger: int = 0) -> None:
        self._wires.to_front_end.pop(self._identity, None)


class _Watch:
    """Stands for the watch of a process."""

    fd = None

    def __init__(self, pid: int) -> None:
        self.is_alive = True

    def close(self) -> None:
        pass


class _Nothing:
    """Stands for a thread or a context that the simulation has no use for."""

    def __init__(self, *_arguments: object, **_named: object) -> None:
        pass

    def start(self) -> None:
        pass


class NoGarbage:
    """Stands for the collector's schedule: a collection takes longer than a whole simulated life."""

    def collect_if_due(self, is_idle: bool) -> None:
        pass


class SimulatedLink(FrontEndLink):
    def __init__(self, wires: Wires) -> None:
        self._socket = _RouterEnd(wires)
        self.front_ends = {}
        self.has_had_front_end = False
        self._shares = Shares()
        self._room, self._has_heard = QueueRoom(None), False

    @property
    def is_server_alive(self) -> bool:
        return True

    def wait(self, timeout_ms: int) -> bool:
        return False

    def join(self, identity: bytes, hello: Hello) -> None:
        with patch.object(front_end_link, "ProcessWatch", _Watch):
            super().join(identity, hello)

    def kill(self, front_end_id: int) -> None:
        """The front end's process is gone."""
        if front_end_id in self.front_ends:
            self.front_ends[front_end_id].watch.is_alive = False


class SimulatedClient(EngineClient):
    """An `EngineClient` whose thread is the simulation: `attach`, `send`, `receive` and `end_life` are its turns."""

    def __init__(self, front_end_id: int) -> None:
        with patch("threading.Thread", _Nothing), patch("zmq.Context", _Nothing):
            super().__init__(front_end_id)

    def attach(self, wires: Wires) -> None:
        self._socket = DealerEnd(wires, b"front-end-%d" % self.front_end_id)  # type: ignore[assignment]
        self._socket.send(encode(Hello(self.front_end_id, 1)), 0)

    def send(self) -> None:
        self._flush()

    def receive(self) -> None:
        self._receive()

    def end_life(self) -> None:
        try:
            self._receive()
        finally:  # the thread sets the line up again where that fails, and finds the engine gone
            self._disconnect()

    def give_back(self) -> None:
        self._bell.close()
