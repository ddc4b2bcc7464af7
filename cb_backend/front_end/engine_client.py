"""A front end's line to the engine process: one I/O thread, one socket, the open requests.

Requests and cancellations may come from any thread; results are delivered on the I/O thread to each request's
`RequestSink`, which must not block. When the engine process ends, every open request gets an UNAVAILABLE error at
once. Which engine to talk to is the supervisor's business; what tokens mean is the sinks'.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import numpy as np
import zmq

from cb_backend.errors import ErrorCode, UnavailableError
from cb_backend.front_end.runtime_dir import EngineLife
from cb_backend.messages import (
    AddRequest,
    CancelRequests,
    EngineFailed,
    EngineReady,
    EngineStats,
    Goodbye,
    Hello,
    ModelInfo,
    RequestFailed,
    StepOutput,
    TokenLogprob,
    decode_engine_message,
    encode,
    make_request_id,
    unpack_logprobs,
)
from cb_backend.outputs import NO_TOKEN
from cb_backend.process_watch import ProcessWatch

ENGINE_GONE = "the engine stopped and is being started again; send the request again"
ENGINE_STARTING = "the engine is starting; send the request again"
POLL_MS = 500
LAST_WORDS_MS = 100  # after the engine's end its last messages may still be on their way through the socket

logger = logging.getLogger("cb_backend.front_end")


class RequestSink(Protocol):
    """Where one request's results go. Called on the client's I/O thread; must be quick and must not block."""

    def on_tokens(
        self, token_ids: tuple[int, ...], finish_reason: int, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> None:
        """New tokens (none in some endings); `finish_reason` other than `FinishReason.NONE` ends the request.

        `logprobs` has one entry a token if the request asks for them.
        """

    def on_scheduled(self, scheduled_at: float) -> None:
        """When (`time.monotonic`) the request's first step was launched; comes just before its first token."""

    def on_error(self, code: ErrorCode, message: str) -> None:
        """The end of the request."""


class EngineClient:
    """Talks to one engine life after the other. `info` and `stats` keep their last values between lives."""

    def __init__(self, front_end_id: int, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change` is called on the I/O thread whenever `is_ready` or `failure` may have changed."""
        self.front_end_id = front_end_id
        self.info: ModelInfo | None = None
        self.stats: EngineStats | None = None
        self.failure: str | None = None  # why the engine of this life cannot start or go on
        self.life: EngineLife | None = None  # the engine that this client talks to, or last talked to
        self.last_message_time = time.monotonic()
        self._on_change = on_change
        self._lock = threading.Lock()  # guards the fields of this block
        self._is_ready = False
        self._sinks: dict[int, RequestSink] = {}  # by request id
        self._outbox: deque[bytes] = deque()
        self._next_life: EngineLife | None = None
        self._is_closing = False
        self._counter = itertools.count(1)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket | None = None
        self._watch: ProcessWatch | None = None
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()

    # ---- called from any thread -------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    @property
    def num_open_requests(self) -> int:
        return len(self._sinks)

    def new_request_id(self) -> int:
        return make_request_id(self.front_end_id, next(self._counter))

    def connect(self, life: EngineLife) -> None:
        """Talk to this engine from now on."""
        with self._lock:
            self._next_life = life
        self._wake()

    def submit(self, request: AddRequest, sink: RequestSink) -> None:
        """Send a request to the engine. Raises `UnavailableError` while there is none."""
        frame = encode(request)
        with self._lock:
            if not self._is_ready:
                raise UnavailableError(ENGINE_STARTING if self.life is None else ENGINE_GONE)
            self._sinks[request.request_id] = sink
            self._outbox.append(frame)
        self._wake()

    def cancel(self, request_ids: Iterable[int]) -> None:
        """End requests; their sinks hear nothing more. Unknown and finished ids are ignored."""
        with self._lock:
            known = [request_id for request_id in request_ids if self._sinks.pop(request_id, None) is not None]
            if known:
                self._outbox.append(encode(CancelRequests(known)))
        if known:
            self._wake()

    def close(self) -> None:
        """Say goodbye, end what is open, stop the thread. The client cannot be used afterwards."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        self._wake()
        self._thread.join()
        self._context.term()
        os.close(self._wake_fd)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # ---- I/O thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._wait()
                self._start_next_life()
                self._flush()
                self._receive()
                if self._watch is not None and not self._watch.is_alive:
                    self._end_life()
        except Exception:
            logger.exception("the line to the engine broke")
        finally:
            self._fail_open_requests("the model is being stopped; send the request again later")
            if self._socket is not None:
                self._flush()
                self._socket.send(encode(Goodbye(self.front_end_id)), zmq.NOBLOCK)
            self._disconnect()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)
        if self._watch is not None and self._watch.fd is not None:
            poller.register(self._watch.fd, zmq.POLLIN)
        if (self._wake_fd, zmq.POLLIN) in poller.poll(POLL_MS):
            os.eventfd_read(self._wake_fd)

    def _start_next_life(self) -> None:
        with self._lock:
            life, self._next_life = self._next_life, None
        if life is None:
            return
        self._disconnect()
        self.failure = None
        self.life = life
        self._watch = ProcessWatch(life.pid, life.start_time)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"front-end-%d" % self.front_end_id)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.connect(f"ipc://{life.socket_path}")
        self._socket.send(encode(Hello(self.front_end_id, os.getpid())), zmq.NOBLOCK)

    def _flush(self) -> None:
        while self._socket is not None and self._outbox:
            self._socket.send(self._outbox.popleft(), zmq.NOBLOCK)

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.last_message_time = time.monotonic()
            try:
                self._handle(decode_engine_message(frame))
            except msgspec.DecodeError as error:
                logger.warning("ignored a malformed message of the engine: %s", error)

    def _handle(self, message: object) -> None:
        if isinstance(message, StepOutput):
            self._deliver(message)
        elif isinstance(message, EngineStats):
            self.stats = message
        elif isinstance(message, RequestFailed):
            sink = self._sinks.pop(message.request_id, None)
            if sink is not None:
                sink.on_error(ErrorCode(message.code), message.message)
        elif isinstance(message, EngineReady):
            self.info = message.info
            with self._lock:
                self._is_ready = True
            self._on_change()
        elif isinstance(message, EngineFailed):
            self.failure = message.message
            self._fail_open_requests(ENGINE_GONE)
            self._on_change()

    def _deliver(self, output: StepOutput) -> None:
        request_ids = np.frombuffer(output.request_ids, "<i8").tolist()
        token_ids = np.frombuffer(output.token_ids, "<i4").tolist()
        sinks = self._sinks
        logprobs = {} if output.logprobs is None else unpack_logprobs(output.logprobs)
        for request_id, scheduled_at in output.scheduled_at.items():
            if (waiting := sinks.get(request_id)) is not None:
                waiting.on_scheduled(scheduled_at)
        entries = enumerate(zip(request_ids, token_ids, output.finish_reasons, strict=True))
        for entry, (request_id, token_id, reason) in entries:
            sink = sinks.pop(request_id, None) if reason else sinks.get(request_id)
            if sink is None:  # cancelled here while the step was on its way
                continue
            token = (token_id,) if token_id != NO_TOKEN else ()
            if entry in logprobs:
                sink.on_tokens(token, reason, (logprobs[entry],))
            else:
                sink.on_tokens(token, reason)

    def _end_life(self) -> None:
        """The engine process has ended: hear its last words, then fail what is open."""
        if self._socket is not None and self._socket.poll(LAST_WORDS_MS):
            self._receive()
        logger.warning("the engine process %d has ended", self.life.pid if self.life else 0)
        self._disconnect()
        self._on_change()

    def _disconnect(self) -> None:
        self._fail_open_requests(ENGINE_GONE)
        if self._socket is not None:
            self._socket.close(linger=1000 if self._is_closing else 0)
            self._socket = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _fail_open_requests(self, reason: str) -> None:
        with self._lock:
            self._is_ready = False
            sinks, self._sinks = self._sinks, {}
            self._outbox.clear()
        for sink in sinks.values():
            sink.on_error(ErrorCode.UNAVAILABLE, reason)
