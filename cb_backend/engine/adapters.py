"""Adapters in host memory: read by threads beside the engine's loop, kept for those who ask again.

An adapter is known by its contents: two names for the same files share everything, and a name whose files have changed
shares nothing with what it was. Files are told apart by path, times, size and inode, as front ends saw them, so that
nothing is read twice. Files that had changed again when they were read are no more than what those get who asked for
them by then: another time the old ones may be back. What cannot be served is an error of the request that named it,
and of nobody else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol, cast

import msgspec

from cb_backend.contracts.adapters import AdapterKey, AdapterSource, num_kept
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import CbError, InvalidRequestError, UnavailableError
from cb_backend.contracts.messages import AdapterStats, ModelInfo
from cb_backend.contracts.step import Runner
from cb_backend.engine.adapter_line import RoomLine, Turn
from cb_backend.support.adapter_files import Stamp

NUM_THREADS = 2
READ_TIMEOUT_S = 30.0  # of a request that waits, from when it is its turn
REFUSAL_LASTS_S = 5.0  # files that were refused are not read again for so long, however many ask
WITHOUT_ROOM = -1
MAX_KNOWN = 4096  # files whose contents are known

logger = logging.getLogger("cb_backend.engine")


class PackedAdapter(Protocol):
    """An adapter as a runner's `read` gives it, ready to be copied to the device."""

    @property
    def key(self) -> AdapterKey: ...

    @property
    def stamp(self) -> Stamp | None: ...  # of the files that were read; None: they never change


class AdapterReader(Protocol):
    """A runner's part: what it reads it can load."""

    packed_of: Callable[[AdapterKey], PackedAdapter] | None

    def read(self, path: str) -> PackedAdapter: ...


class AdaptedRunner(Runner, Protocol):
    """A runner whose `ModelInfo.num_adapter_slots` is above 0."""

    adapters: AdapterReader


class AdapterStore:
    """Owned by the engine's loop; only reading is done by threads."""

    def __init__(self, reader: AdapterReader, most_kept: int) -> None:
        """`most_kept` adapters have room in memory: while requests need them all, no other is read."""
        self.num_reads = 0  # this and the following count since the start
        self.num_refused = 0
        self.read_seconds = 0.0
        self._read = reader.read
        self._most_kept = most_kept
        self._kept: OrderedDict[AdapterKey, PackedAdapter] = OrderedDict()  # least recently used first
        self._known: OrderedDict[AdapterSource, AdapterKey] = OrderedDict()
        self._passing: dict[AdapterSource, AdapterKey] = {}  # in this round: what was found in place of these files
        self._reading: dict[AdapterSource, Future[PackedAdapter]] = {}
        self._refused: dict[AdapterSource, tuple[float, CbError]] = {}  # until when, and why
        self._stuck: dict[AdapterSource, Future[PackedAdapter]] = {}  # reads that were given up and may still end
        self.line = RoomLine()
        self._wanted: set[AdapterSource] = set()  # asked for in this round, and not read for want of room
        self._awaited: set[AdapterSource] = set()  # asked for in this round, and being read
        self._asked_at: dict[AdapterSource, float] = {}  # of those that are read: when last
        self._new_pool: Callable[[], Executor] = partial(ThreadPoolExecutor, NUM_THREADS, thread_name_prefix="adapter")
        self._pool: Executor | None = None  # the first read makes it, and the first after one that was given up
        self._lock = threading.Lock()  # guards the counts
        reader.packed_of = self.packed_of

    def packed_of(self, key: AdapterKey) -> PackedAdapter:
        """One that is kept. Those of requests that are waiting or running are."""
        return self._kept[key]

    def find(self, source: AdapterSource, now: float, turn: Turn | None = None) -> AdapterKey | None:
        """The adapter in these files; None while they are read, wait for room in memory, or others wait for it whom
        `turn` may not pass (None: it is nobody's). Raises a `CbError` for what cannot be served."""
        may_have = turn is None or self.line.may_pass(turn)
        key = self._known.get(source) or self._passing.get(source)
        if key is not None and key in self._kept:
            if not may_have:
                return None
            if source in self._known:
                self._known.move_to_end(source)
            self._kept.move_to_end(key)
            return key
        until, refusal = self._refused.get(source, (now, None))
        if refusal is not None and now < until:
            raise refusal.with_traceback(None)  # the same object again: what raised it before would stay with it
        self._refused.pop(source, None)
        if source in self._stuck:
            if not self._stuck[source].done():
                raise _overdue(source)  # one thread that waits for these files is enough
            self._reading[source] = self._stuck.pop(source)
        future = self._reading.get(source)
        if future is None:
            has_room = len(self._kept) + len(self._reading) < self._most_kept
            if not has_room or (turn is not None and not self.line.is_first(turn)):
                self._wanted.add(source)
                return None
            future = self._submit(source)
        if not future.done():
            self._awaited.add(source)
            self._asked_at[source] = now
            return None
        del self._reading[source]
        try:
            packed = future.result()
        except CbError as error:
            self._refused = {other: told for other, told in self._refused.items() if now < told[0]}
            self._refused[source] = now + REFUSAL_LASTS_S, error
            raise
        key = self._keep(source, packed)
        return key if may_have else None

    def turn_of(self, source: AdapterSource) -> int | None:
        """Files that are not read yet: how many others have been by now, or `WITHOUT_ROOM`; None once a thread is at
        them."""
        future = self._reading.get(source)
        if future is None:
            return WITHOUT_ROOM
        return None if future.running() else self.num_reads

    def give_up(self, source: AdapterSource) -> CbError:
        """Wait no longer for these files. Their thread may hang as long as it likes: others have their turn on new
        ones. Returns what to tell who asked for them."""
        future = self._reading.pop(source, None)
        if future is not None and not future.cancel():
            self._stuck[source] = future
            if self._pool is not None:
                self._pool.shutdown(wait=False)
                self._pool = None
            for other in [other for other, waiting in self._reading.items() if waiting.cancel()]:
                self._submit(other)
        return _overdue(source)

    def tidy(self, in_use: Callable[[], Container[AdapterKey]], now: float) -> None:
        """Forget the least recently used where others want their room; those in use stay.

        To be called when whoever waits has asked for what he waits for: a round. What has been read for nobody is kept,
        or is forgotten, like all else; what somebody waits for is his in the next round. What hangs gives its room back
        though nobody waits for it who could give it up.
        """
        for source in [source for source in self._reading if source not in self._awaited]:
            if self._reading[source].done():
                with contextlib.suppress(CbError):
                    self.find(source, now)
            elif now - self._asked_at[source] > READ_TIMEOUT_S:
                self.give_up(source)
        self._asked_at = {source: self._asked_at[source] for source in self._reading}
        num_too_many = len(self._kept) + len(self._reading) - self._most_kept + len(self._wanted)
        self._wanted.clear()
        self._awaited.clear()
        self._passing.clear()
        self.line.end_round()
        if num_too_many > 0:
            used = in_use()
            for key in [key for key in self._kept if key not in used][:num_too_many]:
                del self._kept[key]

    def add_to(self, stats: AdapterStats | None) -> AdapterStats | None:
        """What is told of adapters, completed by what is known here."""
        if stats is None:
            return None
        return msgspec.structs.replace(
            stats,
            num_kept=len(self._kept),
            num_reads=self.num_reads,
            num_refused=self.num_refused,
            read_seconds=self.read_seconds,
        )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._kept.clear()

    def _submit(self, source: AdapterSource) -> Future[PackedAdapter]:
        if self._pool is None:
            self._pool = self._new_pool()
        future = self._reading[source] = self._pool.submit(self._read_files, source)
        return future

    def _keep(self, source: AdapterSource, packed: PackedAdapter) -> AdapterKey:
        self._kept.setdefault(packed.key, packed)
        self._kept.move_to_end(packed.key)
        if packed.stamp is not None and not packed.stamp.is_of(source):
            self._passing[source] = packed.key
            return packed.key
        self._known[source] = packed.key
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return packed.key

    # ---- on the threads --------------------------------------------------------------------------------------------

    def _read_files(self, source: AdapterSource) -> PackedAdapter:
        begin = time.perf_counter()
        refusal: CbError | None = None
        try:
            return self._read(source.path)
        except Exception as error:
            refusal = _refusal(source, error)
        finally:
            with self._lock:
                self.num_reads += 1
                self.num_refused += refusal is not None
                self.read_seconds += time.perf_counter() - begin
        raise refusal  # NOTE: not where the other was caught: that one has a hold on what had been read by then


def _refusal(source: AdapterSource, error: Exception) -> CbError:
    """What to tell who asked for files whose reading failed so."""
    if isinstance(error, UnavailableError):  # it may be served, but not now
        return UnavailableError(f"adapter {source.name!r}: {error}; try again later")
    if isinstance(error, CbError):
        return InvalidRequestError(f"adapter {source.name!r} cannot be served: {error}")
    if isinstance(error, MemoryError):
        return UnavailableError(f"adapter {source.name!r}: the host has no memory for it; try again later")
    logger.error("adapter %s in %s could not be read", source.name, source.path, exc_info=error)
    return InvalidRequestError(f"adapter {source.name!r} could not be read: {type(error).__name__}: {error}")


def _overdue(source: AdapterSource) -> CbError:
    return UnavailableError(
        f"adapter {source.name!r} was not read from {source.path} within {READ_TIMEOUT_S:.0f} s; look at the disk that"
        " it is on, and try again"
    )


def new_adapter_store(config: EngineConfig, info: ModelInfo, runner: Runner) -> AdapterStore | None:
    """None where no adapters are taken."""
    if not info.num_adapter_slots:
        return None
    most_kept = num_kept(config.max_cpu_loras, info.num_adapter_slots)
    return AdapterStore(cast(AdaptedRunner, runner).adapters, most_kept)
