"""The threads that send: each serves a queue of requests, and none of them can be lost to a client that does not read.

A `send` normally takes 100 to 300 microseconds. But a server that bounds what it buffers for a client (its option
`--grpc-max-response-pool-size`) lets `send` wait for a client that has stopped reading, for as long as that takes. So a
watch looks at all turns: one that takes longer than `HELD_UP_S` loses its queue to a new thread, which serves the
others, and keeps only the request it is stuck with; after `slow_reader_timeout_s` that request is ended. (Servers that
bound nothing take every response at once and keep what is not read: there is nothing to see from here.) What is sent
is the responder's business.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cb_backend.serving.latency import Latencies, ThreadLatencies
from cb_backend.serving.live_request import LiveRequest
from cb_backend.support.silence import SilenceClock

HELD_UP_S = 0.25  # longer than a send takes on a busy machine; a false alarm costs the start of a thread
TICK_S = 0.05
MAX_HELD_UP = 64  # threads; beyond, queues wait for the clients that hold them up
CLOSE_TIMEOUT_S = 2.0

logger = logging.getLogger("cb_backend.serving")


@dataclass(eq=False)
class Tally:
    """What one thread counts, so without a lock."""

    latencies: ThreadLatencies
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class _Turn:
    """One thread's place: the request that it serves now."""

    tally: Tally
    live: LiveRequest | None = None
    since: float = 0.0  # seconds of the watch's clock at which it began to serve it
    is_owner: bool = True  # of its queue; False: when this request is done, the thread ends
    is_reported: bool = False
    thread: threading.Thread | None = None


class Senders:
    """`num_threads` queues with a thread each. `serve` handles one request; `give_up` ends one that is held up."""

    def __init__(
        self,
        num_threads: int,
        latencies: Latencies,
        serve: Callable[[LiveRequest, Tally], None],
        give_up: Callable[[LiveRequest, Tally], None],
        slow_reader_timeout_s: float,
    ) -> None:
        self._latencies = latencies
        self._serve = serve
        self._give_up = give_up
        self._timeout_s = slow_reader_timeout_s
        self.tallies: list[Tally] = []  # of all threads that there have been
        self._free_tallies: list[Tally] = []
        self.queues: list[queue.SimpleQueue[LiveRequest | None]] = [queue.SimpleQueue() for _ in range(num_threads)]
        self._is_closing = False
        # NOTE: time counts while somebody looks. A process that was stopped finds turns that are old when it wakes, and
        # would give up threads that are about to send: they would speak to a server that takes this process for closed.
        self._clock = SilenceClock()
        self._own_counts = Tally(ThreadLatencies())  # the watch's
        self.tallies.append(self._own_counts)
        self._owners = [self._start(index) for index in range(num_threads)]
        self._held_up: list[_Turn] = []
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._run_watch, name="sender-watch", daemon=True)
        self._watch.start()

    @property
    def num_held_up(self) -> int:
        """Threads that wait for a client to read."""
        return len(self._held_up)

    def close(self) -> None:
        """Serve what is queued, then stop; threads that are held up get a moment."""
        self._stop.set()
        self._watch.join()  # from here on this thread looks: no queue changes hands between its look and its question
        self._is_closing = True
        for news in self.queues:
            news.put(None)
        deadline = self._clock.look() + CLOSE_TIMEOUT_S
        self._look_safely()
        while not (all(map(self._is_served, self._owners)) and all(map(self._has_ended, self._held_up))):
            if self._clock.seconds > deadline and not all(turn.is_owner for turn in self._owners):
                logger.error("a sender thread could not be started: requests that it should have served get no end")
                return
            time.sleep(TICK_S / 5)
            self._look_safely()

    def _is_served(self, owner: _Turn) -> bool:
        """Whether a queue needs nobody any more. NOTE: not while the thread that is to take it over is missing."""
        return owner.is_owner and self._has_ended(owner)

    def _has_ended(self, turn: _Turn) -> bool:
        """NOTE: one that waits for a client is given up: nothing can end it, and the server is about to."""
        is_stuck = turn.live is not None and self._clock.seconds - turn.since > CLOSE_TIMEOUT_S
        return is_stuck or turn.thread is None or not turn.thread.is_alive()

    # ---- threads ------------------------------------------------------------------------------------------------

    def _start(self, index: int) -> _Turn:
        turn = _Turn(self._new_tally())
        turn.thread = threading.Thread(target=self._run, args=(index, turn), name=f"sender-{index}", daemon=True)
        turn.thread.start()
        return turn

    def _new_tally(self) -> Tally:
        if self._free_tallies:
            return self._free_tallies.pop()
        tally = Tally(self._latencies.new_thread())
        self.tallies.append(tally)
        return tally

    def _run(self, index: int, turn: _Turn) -> None:
        news = self.queues[index]
        while turn.is_owner and (live := news.get()) is not None:
            if live.is_closed or not live.turn_lock.acquire(blocking=False):
                continue  # another thread is held up with it, and will queue it again
            turn.since = self._clock.seconds
            turn.live = live
            try:
                self._serve(live, turn.tally)
            finally:
                turn.live = None
                live.turn_lock.release()
            if not turn.is_owner:
                news.put(live)  # what has come for it meanwhile
                # NOTE: asked after the request is queued: who closes later stops the queue's owner behind it.
                if self._is_closing:  # the owner may have stopped already
                    news.put(None)
                    turn.is_owner = True

    def _run_watch(self) -> None:
        while not self._stop.wait(TICK_S):
            self._look_safely()

    def _look_safely(self) -> None:
        try:
            self._look(self._clock.look())
        except Exception:
            logger.exception("looking at the sender threads failed")

    def _look(self, now: float) -> None:
        for index, turn in enumerate(self._owners):
            is_held_up = turn.live is not None and now - turn.since >= HELD_UP_S and len(self._held_up) < MAX_HELD_UP
            if is_held_up or not turn.is_owner:  # the second: a new thread could not be started last time
                # NOTE: in this order, so that whoever finds a request taken knows that it will be queued again.
                turn.is_owner = False
                self._owners[index] = self._start(index)
                self._held_up.append(turn)
        for turn in list(self._held_up):
            live = turn.live
            if turn.thread is not None and not turn.thread.is_alive():
                self._held_up.remove(turn)
                self._free_tallies.append(turn.tally)
            elif live is not None and now - turn.since > self._timeout_s and not turn.is_reported:
                turn.is_reported = True
                self._give_up(live, self._own_counts)
