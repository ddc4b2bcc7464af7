"""The loop of the engine process around `LLMEngine`, its front ends at the other end of a socket.

One thread: take messages (without waiting while there is work), step, send one `StepOutput` to each front end that the
step concerns. The loop ends with the server, with the last front end, or when three steps in a row failed. It does not
know text, tokenizers or the server's interface.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import msgspec

from cb_backend.contracts.errors import CbError, ErrorCode, GaveUpError
from cb_backend.contracts.messages import (
    AddRequest,
    CancelRequests,
    EngineFailed,
    EngineReady,
    EngineStats,
    Goodbye,
    Hello,
    RequestFailed,
    ResetPrefixCache,
    token_ids_from_bytes,
)
from cb_backend.contracts.queue_room import RefusedRequests
from cb_backend.contracts.rest import CallOffOrders, RestStats, SetRest, UpdateWeights
from cb_backend.contracts.step_dump import DumpSteps
from cb_backend.engine.front_end_link import FrontEndLink
from cb_backend.engine.garbage import GarbageSchedule
from cb_backend.engine.llm_engine import LLMEngine, StepFailedError
from cb_backend.engine.rest_desk import RestDesk, ask
from cb_backend.support.fault_points import reach
from cb_backend.support.silence import SilenceClock

EXIT_DONE, EXIT_START_FAILED, EXIT_CONFIG_ERROR, EXIT_GAVE_UP = range(4)  # of the process; `run` returns two of them

MAX_MESSAGES_PER_STEP = 1024  # so that a flood of requests cannot hold up the running ones
IDLE_POLL_MS = 500
WATCH_INTERVAL_S = 0.1  # how often dead processes are looked for while steps run
STATS_INTERVAL_S = 0.5
STALL_TIMEOUT_S = 10.0  # unfinished requests, but nothing to run
MAX_FAILED_STEPS_IN_A_ROW = 3

logger = logging.getLogger("cb_backend.engine")


class EngineProcess:
    """The loop. `run` returns the exit code."""

    def __init__(self, engine: LLMEngine, link: FrontEndLink, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.desk: RestDesk | None = None  # of a model that may sleep
        self.link = link
        self.is_stopping = False
        self._clock = clock
        now = clock()
        self._start_time = now
        self._next_watch = now
        self._next_stats = now
        self._silence = SilenceClock(clock)  # of steps while requests are open
        self._was_busy = False
        self._garbage = GarbageSchedule()
        self._num_failed_steps = 0  # in a row
        self._step_id = 0
        self._num_refused = 0  # by front ends, who knew that the queue was full

    def run(self) -> int:
        try:
            with self._garbage:
                while not self.is_stopping:
                    self.turn()
            return EXIT_DONE
        except GaveUpError as error:
            logger.error("%s", error)
            self.link.send_to_all(EngineFailed(str(error)))
            return EXIT_GAVE_UP

    def turn(self) -> None:
        """Messages, a step if there is something to do, and what must happen now and then."""
        self._take_messages()
        self._expire()
        if self.desk is not None and not self.desk.may_step():
            self._silence.heard()
        elif self.engine.has_unfinished():
            self._step()
        self._tell_room()
        self._look_around()

    # ---- messages ---------------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        if not self.engine.has_unfinished():
            has_news = self.link.wait(IDLE_POLL_MS if self.desk is None else self.desk.rest.idle_poll_ms(IDLE_POLL_MS))
            self._silence.heard()
            if not has_news:
                self._garbage.collect_if_due(is_idle=True)
        for _ in range(MAX_MESSAGES_PER_STEP):
            received = self.link.receive()
            if received is None:
                return
            self._handle(*received)

    def _handle(self, identity: bytes, message: object) -> None:
        self.link.heard(identity)
        reach("process.handle")
        if isinstance(message, AddRequest):
            self._add_request(identity, message)
        elif isinstance(message, CancelRequests):
            self._cancel(identity, message.request_ids)
        elif isinstance(message, Hello):
            self.link.join(identity, message)
            self.link.send(identity, EngineReady(pid=os.getpid(), info=self.engine.info))
            self.link.send(identity, self._stats())
        elif isinstance(message, RefusedRequests):
            self._num_refused += message.num_requests
        elif isinstance(message, Goodbye):
            self._drop_front_end(message.front_end_id)
        elif isinstance(message, DumpSteps):
            dump = self.engine.log.dump(message.max_steps)
            self.link.send(identity, msgspec.structs.replace(dump, rest=self._rest_stats()))
        elif isinstance(message, SetRest | UpdateWeights | CallOffOrders):
            ask(self.desk, self.link, identity, message)
        elif isinstance(message, ResetPrefixCache):
            self.engine.scheduler.reset_prefix_cache()
            self.link.send(identity, self._stats())

    def _add_request(self, identity: bytes, message: AddRequest) -> None:
        front_end = self.link.sender(identity, message.request_id)
        if front_end is None:
            logger.warning("ignored a request of a front end that has not said hello")
            return
        try:
            token_ids = token_ids_from_bytes(message.prompt_token_ids)
            request = self.engine.make_request(
                message.request_id, token_ids, message.params, message.scheduling, message.adapter
            )
            self.engine.add_request(request)
        except CbError as error:
            self.link.send(identity, RequestFailed(message.request_id, int(error.code), str(error)))
        except Exception:
            logger.exception("request %d could not be added", message.request_id)
            reason = "the engine could not take the request; the server's log has the reason"
            self.link.send(identity, RequestFailed(message.request_id, int(ErrorCode.INTERNAL), reason))
        else:
            front_end.open_request_ids.add(message.request_id)
            self._was_busy = True  # even if it is cancelled before the next step, the statistics tell of it

    def _cancel(self, identity: bytes, request_ids: list[int]) -> None:
        for request_id in request_ids:
            front_end = self.link.sender(identity, request_id)
            if front_end is not None:
                front_end.open_request_ids.discard(request_id)
                self.engine.cancel(request_id)

    def _expire(self) -> None:
        expired, refused = self.engine.expire(), self.engine.release_held()
        self._tell_room()
        for request_id, reason in expired:
            self.link.send_failure(request_id, ErrorCode.UNAVAILABLE, reason)
        for request_id, error in refused:
            self.link.send_failure(request_id, error.code, str(error))

    def _tell_room(self) -> None:
        self.link.tell_room(self.engine.queue_room)

    def _drop_front_end(self, front_end_id: int) -> None:
        for request_id in self.link.leave(front_end_id):
            self.engine.cancel(request_id)

    # ---- steps ------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._garbage.has_run = True
        try:
            output = self.engine.step()
            self._num_failed_steps = 0
        except StepFailedError as error:
            logger.exception("a step failed; its requests end with an error")
            output = error.output
            self._num_failed_steps += 1
            self.engine.check_runner()
        if output is not None:
            self._silence.heard()
            if not self.engine.has_requests():  # first, so that the last clients find their work in the metrics
                self.link.send_to_all(self._stats())
                self._was_busy = self.engine.has_unfinished()
            self._tell_room()  # before a client that has its answer can send its next request
            reach("process.send_output")
            self._step_id += 1
            self.link.send_output(self._step_id, output, self.engine.log.first_tokens)
        elif self.engine.has_unfinished():
            self._wait_out_stall()
        if self._num_failed_steps >= MAX_FAILED_STEPS_IN_A_ROW:
            raise GaveUpError(f"{self._num_failed_steps} steps in a row failed; the reasons are above")

    def _wait_out_stall(self) -> None:
        if self.engine.is_holding or (self.desk is not None and self.desk.rest.is_draining):  # ends by itself
            self._silence.heard()
        if self._silence.look() > STALL_TIMEOUT_S:
            raise GaveUpError(f"no progress for {STALL_TIMEOUT_S:.0f} s with open requests: {self.engine.stats()}")
        self.link.wait(1)

    # ---- between steps ----------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """What must happen now and then: statistics, dead processes, garbage."""
        now = self._clock()
        is_busy = self.engine.has_unfinished()
        if (is_busy and now >= self._next_stats) or (self._was_busy and not is_busy):
            self.send_stats()
            self._next_stats = now + STATS_INTERVAL_S
        if now >= self._next_watch or not is_busy:
            self._watch_processes(now)
            self._next_watch = now + WATCH_INTERVAL_S
        self._garbage.collect_if_due(is_idle=False)
        self._was_busy = is_busy

    def send_stats(self) -> None:
        try:
            reach("process.stats")
            self.link.send_to_all(self._stats())
        except Exception:  # nobody's answer depends on them
            logger.exception("the statistics could not be told")

    def _stats(self) -> EngineStats:
        stats = self.engine.stats()
        num_refused = stats.num_refused + self._num_refused
        return msgspec.structs.replace(stats, engine_pid=os.getpid(), num_refused=num_refused, rest=self._rest_stats())

    def _rest_stats(self) -> RestStats | None:
        return None if self.desk is None else self.desk.stats()

    def _watch_processes(self, now: float) -> None:
        self.engine.check_runner()
        for front_end_id in self.link.dead_front_ends():
            logger.warning("front end %d is gone; its requests are aborted", front_end_id)
            self._drop_front_end(front_end_id)
        self.link.end_requests_of_silent(self.engine.config.watchdog_timeout_s, self.engine.cancel)
        if (over := self.link.why_over(now - self._start_time)) is not None:
            logger.info("%s; the engine ends", over)
            self.is_stopping = True
