"""A front end's line to one engine process: an I/O thread, a socket, the open requests.

Requests and cancellations may come from any thread; results are delivered on the I/O thread to each request's
`RequestSink`, which must not block. When the engine process ends, every open request gets an UNAVAILABLE error at
once; an engine that has requests and falls silent is ended, so that the same happens. Which engine to talk to is the
supervisor's business; what tokens mean is the sinks'.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import zmq

from cb_backend.contracts.errors import ErrorCode, UnavailableError
from cb_backend.contracts.messages import (
    AddRequest,
    Alive,
    CancelRequests,
    EngineFailed,
    EngineReady,
    EngineStats,
    Goodbye,
    Hello,
    ModelInfo,
    RequestFailed,
    StepOutput,
    decode_engine_message,
    encode,
)
from cb_backend.contracts.queue_room import KnownRoom, QueueRoom
from cb_backend.front_end.engines.bell import Bell
from cb_backend.front_end.engines.request_sink import RequestSink, deliver, tell_error
from cb_backend.front_end.engines.runtime_dir import EngineLife
from cb_backend.support.process_watch import ProcessWatch
from cb_backend.support.silence import SilenceClock

ENGINE_GONE = "the engine stopped and is being started again; send the request again"
ENGINE_STARTING = "the engine is starting; send the request again"
ENGINE_STUCK = "the engine made no progress for {:g} s, so it is being started again; send the request again"
LINE_BROKEN = "the line to the engine broke and is being set up again; send the request again"
POLL_MS = 500
ALIVE_INTERVAL_S = 0.5
RETRY_S = 0.5  # before the line is set up again
LAST_WORDS_MS = 100  # after the engine's end its last messages may still be on their way through the socket
# As numbers: with the enum's members each call would build new ones.
_NO_WAIT, _EVENTS, _IS_READABLE = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)

logger = logging.getLogger("cb_backend.front_end")


class EngineClient:
    """Talks to one engine life after the other. `info` and `stats` keep their last values between lives."""

    def __init__(
        self, front_end_id: int, on_change: Callable[[], None] = lambda: None, watchdog_timeout_s: float = 0.0
    ) -> None:
        """`on_change` is called on the I/O thread whenever `is_ready` or `failure` may have changed.

        `watchdog_timeout_s`: silence of an engine with open requests after which it is ended; 0: never.
        """
        self.front_end_id = front_end_id
        self.info: ModelInfo | None = None
        self.stats: EngineStats | None = None
        self.failure: str | None = None  # why the engine of this life cannot start or go on
        self.life: EngineLife | None = None  # the engine that this client talks to, or last talked to
        self.room = KnownRoom()  # of the engine's queue
        self.ready_life: EngineLife | None = None  # the one that was ready last
        self.ended_life: EngineLife | None = None  # whose end this client has noticed last, its last words heard
        self.has_said_goodbye = False  # at closing, to an engine that served it
        self._watchdog_timeout_s = watchdog_timeout_s
        self._silence = SilenceClock()  # of the engine while requests are open
        self._next_alive = 0.0
        self._abandoned: list[int] = []  # requests that have ended here, and that the engine must be told of
        self._end_reason = ENGINE_GONE  # what open requests are told when the engine has ended
        self.on_idle: Callable[[], None] = lambda: None  # called on the I/O thread when the engine has nothing to do
        self._on_change = on_change
        self._lock = threading.Lock()  # guards the fields of this block
        self._is_ready = False
        self._sinks: dict[int, RequestSink] = {}  # by request id
        self._outbox: deque[bytes] = deque()
        self._next_life: EngineLife | None = None
        self._is_closing = False
        self._num_others = 0  # requests of other front ends, as of the last statistics
        self._bell = Bell()  # wakes the I/O thread
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket | None = None
        self._watch: ProcessWatch | None = None
        self._poller: zmq.Poller | None = None  # of socket and watch; None: to be made
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()

    # ---- called from any thread -------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    @property
    def load(self) -> int:
        """Requests that the engine has: ours now, and those of other front ends when it last told."""
        return len(self._sinks) + self._num_others

    @property
    def silence_s(self) -> float:
        """How long the engine has said nothing though requests are open; it speaks twice a second while it steps."""
        return self._silence.seconds

    def connect(self, life: EngineLife) -> None:
        """Talk to this engine from now on."""
        with self._lock:
            self._next_life = life
            self._bell.ring()

    def submit(self, request: AddRequest, sink: RequestSink) -> None:
        """Send a request to the engine. Raises `UnavailableError` while there is none."""
        frame = encode(request)
        with self._lock:
            if not self._is_ready:
                raise UnavailableError(ENGINE_STARTING if self.life is None else ENGINE_GONE)
            self._sinks[request.request_id] = sink
            self.room.take()  # first: a telling that counts the request already may come once it is sent
            self._outbox.append(frame)
            self._bell.ring()

    def cancel(self, request_ids: Iterable[int]) -> None:
        """End requests; their sinks hear nothing more. Unknown and finished ids are ignored."""
        with self._lock:
            known = [request_id for request_id in request_ids if self._sinks.pop(request_id, None) is not None]
            if known:
                self._outbox.append(encode(CancelRequests(known)))
                self.room.give_back(len(known))
                self._bell.ring()

    def close(self) -> None:
        """Say goodbye, end what is open, stop the thread. The client cannot be used afterwards."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._bell.ring()
        self._thread.join()
        self._context.term()
        self._bell.close()

    # ---- I/O thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                try:
                    self._turn()
                except Exception:
                    logger.exception("the line to the engine broke")
                    self._set_up_again()
        finally:
            self.has_said_goodbye = self._is_ready
            self._fail_open_requests("the model is being stopped; send the request again later")
            if self._socket is not None:
                self._flush()
                self._socket.send(encode(Goodbye(self.front_end_id)), _NO_WAIT)
            self._disconnect()

    def _turn(self) -> None:
        self._wait()
        self._start_next_life()
        self._flush()
        self._receive()
        self._watch_silence()
        if self._watch is not None and not self._watch.is_alive:
            self._end_life()

    def _set_up_again(self) -> None:
        """After an error of our own: nobody knows what was lost, so what is open ends, here and at the engine."""
        self._abandoned += self._sinks
        self._end_reason = LINE_BROKEN
        self._disconnect()
        with self._lock:
            self._next_life = self._next_life or self.life
        time.sleep(RETRY_S)

    def _watch_silence(self) -> None:
        """Everything that has come was read just before. Says that we are alive, and ends an engine that is not."""
        now = time.monotonic()
        if self._socket is not None and now >= self._next_alive:
            self._next_alive = now + ALIVE_INTERVAL_S
            sign = self.room.take_refused() or (Alive(self.front_end_id) if self._sinks else None)
            if sign is not None:
                self._socket.send(encode(sign), _NO_WAIT)
        if not self._sinks or self._watch is None or self._socket is None:
            self._silence.heard()
            return
        silence_s, limit_s = self._silence.look(), self._watchdog_timeout_s
        if limit_s and silence_s > limit_s and self._watch.is_alive:
            logger.error("the engine %d has requests and was silent for %.0f s; it is ended", self._watch.pid, limit_s)
            self._end_reason = ENGINE_STUCK.format(limit_s)
            self._watch.kill()

    def _wait(self) -> None:
        if self._poller is None:
            self._poller = zmq.Poller()
            for end in (self._bell.fd, self._socket, self._watch and self._watch.fd):
                if end is not None:
                    self._poller.register(end, zmq.POLLIN)
        if (self._bell.fd, zmq.POLLIN) in self._poller.poll(POLL_MS):
            self._bell.heard()

    def _start_next_life(self) -> None:
        with self._lock:
            life, self._next_life = self._next_life, None
        if life is None:
            return
        self._disconnect()
        self.failure = None
        self._end_reason = ENGINE_GONE
        self.life = life
        self._watch, self._poller = ProcessWatch(life.pid, life.start_time), None
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"front-end-%d" % self.front_end_id)
        self._socket.set_hwm(0)  # both ways: nothing is dropped
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.connect(f"ipc://{life.socket_path}")
        self._socket.send(encode(Hello(self.front_end_id, os.getpid())), _NO_WAIT)
        if self._abandoned:
            self._socket.send(encode(CancelRequests(self._abandoned)), _NO_WAIT)
            self._abandoned = []

    def _flush(self) -> None:
        while self._socket is not None and self._outbox:
            self._socket.send(self._outbox.popleft(), _NO_WAIT)

    def _receive(self) -> None:
        while self._socket is not None and int(self._socket.get(_EVENTS)) & _IS_READABLE:
            frame = self._socket.recv(_NO_WAIT)
            self._silence.heard()
            try:
                self._handle(decode_engine_message(frame))
            except msgspec.DecodeError as error:
                logger.warning("ignored a malformed message of the engine: %s", error)

    def _handle(self, message: object) -> None:
        if isinstance(message, StepOutput):
            deliver(message, self._sinks, lambda request_id: self.cancel([request_id]))
        elif isinstance(message, EngineStats):
            self.stats = message
            self._num_others = max(message.num_running + message.num_waiting - len(self._sinks), 0)
            if message.num_running + message.num_waiting == 0:
                self.on_idle()
        elif isinstance(message, RequestFailed):
            sink = self._sinks.pop(message.request_id, None)
            if sink is not None:
                tell_error(sink, ErrorCode(message.code), message.message)
        elif isinstance(message, QueueRoom):
            self.room.told(message)
        elif isinstance(message, EngineReady):
            self.info, self.ready_life = message.info, self.life
            with self._lock:
                self._is_ready = True
            self._on_change()
        elif isinstance(message, EngineFailed):
            self.failure = message.message
            self._fail_open_requests(ENGINE_GONE)
            self._on_change()

    def _end_life(self) -> None:
        """The engine process has ended: hear its last words, then fail what is open."""
        if self._socket is not None and self._socket.poll(LAST_WORDS_MS):
            self._receive()
        logger.warning("the engine process %d has ended", self.life.pid if self.life else 0)
        self._disconnect()
        self.ended_life = self.life
        self._on_change()

    def _disconnect(self) -> None:
        self._fail_open_requests(self._end_reason)
        self._poller = None
        if self._socket is not None:
            self._socket.close(linger=1000 if self._is_closing else 0)
            self._socket = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _fail_open_requests(self, reason: str) -> None:
        with self._lock:
            self._is_ready = False
            self._num_others = 0
            self.room.forget()
            sinks, self._sinks = self._sinks, {}
            self._outbox.clear()
        for sink in sinks.values():
            tell_error(sink, ErrorCode.UNAVAILABLE, reason)
