"""Threads that compute token masks, many requests at a time, and never longer than they may.

The library's own parallel call has no time limit, and a grammar can be built whose next mask takes seconds. Here each
mask is somebody's job: one that computes for too long costs its own request, and the others wait no longer than that.
A thread's own time counts: on a machine that is busy with other things nothing is wrong with a grammar.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cb_backend.engine.grammar.guide import Guide

MASK_TIMEOUT_S = 1.0  # of a core; a thousand times what masks take
MAX_WAIT_S = 60.0  # whatever its thread has computed meanwhile
_MAX_THREADS = 8

logger = logging.getLogger("cb_backend.engine")


class MaskThreads:
    """Started at first use. One caller at a time."""

    def __init__(self, timeout_s: float = MASK_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._num_wanted = max(1, min(_MAX_THREADS, (os.cpu_count() or 2) - 1))
        self._num_threads = 0  # without those that are stuck
        self._work: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()

    def fill(self, guides: Sequence[Guide], masks: NDArray[np.int32]) -> None:
        """Write the mask of guides[i] into masks[i]; one that cannot be had becomes the guide's failure.

        masks: int32 [at least len(guides), words].
        """
        batch = _Batch(guides, masks)
        num_helpers = min(self._num_wanted, len(guides))
        self._start_threads(num_helpers)
        for _ in range(num_helpers):
            self._work.put(batch)
        while not batch.wait(self._timeout_s):
            num_stuck = batch.give_up_stuck(self._timeout_s)
            self._num_threads -= num_stuck
            self._start_threads(num_helpers)
            for _ in range(num_stuck):
                self._work.put(batch)
        for guide, mask in zip(guides, masks, strict=False):
            if guide.failure is None:
                guide.finish_mask(mask)

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._work.put(None)
        self._num_threads = 0

    def _start_threads(self, count: int) -> None:
        while self._num_threads < count:
            self._num_threads += 1
            threading.Thread(target=self._run, name=f"masks-{self._num_threads}", daemon=True).start()

    def _run(self) -> None:
        while (batch := self._work.get()) is not None:
            if not batch.work():
                return  # given up meanwhile; another thread has taken this one's place
            del batch  # nobody's guides are kept while waiting


class _Start(NamedTuple):
    """When a thread began a job: by its own clock, which runs while it computes, and by everybody's."""

    clock_id: int
    thread_time: float
    time: float

    @classmethod
    def of_this_thread(cls) -> _Start:
        clock_id = time.pthread_getcpuclockid(threading.get_ident())
        return cls(clock_id, time.clock_gettime(clock_id), time.monotonic())

    def is_too_long_ago(self, timeout_s: float) -> bool:
        """To be asked only while the thread lives."""
        has_computed_s = time.clock_gettime(self.clock_id) - self.thread_time
        return has_computed_s >= timeout_s or time.monotonic() - self.time >= MAX_WAIT_S


class _Batch:
    """The masks of one step. Jobs are taken one by one, whoever is free."""

    def __init__(self, guides: Sequence[Guide], masks: NDArray[np.int32]) -> None:
        self._guides = guides
        self._masks = masks
        self._lock = threading.Lock()
        self._next = 0
        self._started: dict[int, _Start] = {}  # by job, of those that are being worked on
        self._num_left = len(guides)
        self._is_done = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        return self._is_done.wait(timeout_s)

    def work(self) -> bool:
        """Do jobs until none is left. False: this thread's last job was given up."""
        while True:
            with self._lock:
                job = self._next
                if job >= len(self._guides):
                    return True
                self._next += 1
                self._started[job] = _Start.of_this_thread()
            guide = self._guides[job]
            try:
                if guide.failure is None:
                    guide.fill_mask(self._masks[job])
                is_done = True
            except BaseException:  # a panic of the library is no Exception
                logger.exception("a token mask could not be computed")
                is_done = False
            with self._lock:
                if self._started.pop(job, None) is None:
                    return False
                if not is_done:
                    guide.give_up()
                self._note_end()

    def give_up_stuck(self, timeout_s: float) -> int:
        """Give up the jobs that have taken too long; returns how many."""
        with self._lock:
            stuck = [job for job, start in self._started.items() if start.is_too_long_ago(timeout_s)]
            for job in stuck:
                del self._started[job]
                self._guides[job].give_up()
                self._note_end()
        return len(stuck)

    def _note_end(self) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self._is_done.set()
