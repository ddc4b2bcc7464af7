"""Who waits, and who of them is next: the rules of order.

A request's place is fixed when it arrives: by its arrival time, moved by `priority_aging_s` seconds for each step of
priority. So a request of priority p is overtaken only by those that arrive within (p - q) * priority_aging_s seconds
after it and have a lower priority q: whoever waits long enough is first. Within the most urgent class tenants take
turns (`fair_share`). A preempted request keeps its place, which is before every newcomer of its priority.

Some of the first may pass others (`admission` says when that is worth it): nobody is passed by a less urgent request,
nobody more than `MAX_OVERTAKEN` times while he is one of the first, and nobody after a preemption; only who has a share
of his own passes everybody without. Whoever is further back is passed uncounted by those whose adapter has a slot. This
module does not know blocks, slots or steps; time is told to it.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import UnavailableError
from cb_backend.contracts.queue_room import MUCH_ROOM, TOLD_BELOW, QueueRoom
from cb_backend.contracts.request import QueueKey, Request, RequestStatus
from cb_backend.engine.scheduler.fair_share import FairShare, Flow, fair_order

MAX_OVERTAKEN = 16
_LONGEST_HINT_S = 60


def _key(request: Request) -> QueueKey:
    return request.queue_key


def _take_out(lines: dict[Any, list[Request]], name: object, request: Request) -> None:
    del lines[name][bisect_left(lines[name], request.queue_key, key=_key)]
    if not lines[name]:
        del lines[name]


class RequestQueue:
    """Sorted by `Request.queue_key`. Only newcomers can be refused; a preempted request always has a place."""

    def __init__(self, config: EngineConfig, share: FairShare, is_fair: bool = True) -> None:
        """`is_fair` False: neither tenants nor shares count, and places are all there is."""
        self._max_size = config.max_queue_size
        self._max_tokens = config.max_queue_tokens
        self._aging_s = config.priority_aging_s
        self._share = share
        self._is_fair = is_fair
        # Greatest `priority` value of those for whom a share of slots and blocks is reserved; None: nobody.
        self.reserved_priority = config.reserved_priority if config.reserved_share and is_fair else None
        self._flows: dict[Flow, list[Request]] = {}  # by priority and tenant, each sorted
        self._by_adapter: dict[AdapterKey, list[Request]] | None = {} if config.enable_lora else None  # each sorted
        self._by_id: dict[int, Request] = {}  # held ones too
        self._held: set[int] = set()  # ids of requests that have arrived, but cannot start yet
        self._first: list[Request] = []  # the last answer of `first`, good for these versions of queue and counters
        self._first_version = (-1, -1, 0)
        self._version = 0
        self._num_arrived = 0
        self._last_start: float | None = None
        self._start_interval_s = 0.0  # moving average over the last starts
        self.now = 0.0  # seconds; whoever owns the queue moves it
        self.num_tokens = 0  # of all waiting requests, held ones included
        self.num_refused = 0

    def __len__(self) -> int:
        """Those that may start."""
        return len(self._by_id) - len(self._held)

    def __iter__(self) -> Iterator[Request]:
        """Those that may start, by `queue_key`."""
        return heapq.merge(*self._flows.values(), key=_key)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_id

    @property
    def num_waiting(self) -> int:
        """Held ones included."""
        return len(self._by_id)

    @property
    def everyone(self) -> list[Request]:
        """In no order, held ones included."""
        return list(self._by_id.values())

    # ---- coming and going -------------------------------------------------------------------------------------------

    def arrive(self, request: Request, num_free_slots: int, num_free_tokens: int, is_held: bool = False) -> None:
        """Queue a newcomer. Raises `UnavailableError`, with a hint when to come back, if there are too many already.

        One that is held has its place, but is not seen until `release`.
        What free slots and free memory can take at once does not count as waiting, so that a burst at an idle engine
        is not refused.
        """
        refusal = self._refusal(len(request.token_ids), num_free_slots, num_free_tokens)
        if refusal is not None:
            self.num_refused += 1
            raise UnavailableError(refusal)
        self._num_arrived += 1
        request.arrival_time = self.now
        request.queue_key = (*request.scheduling.rank(self.now, self._aging_s), self._num_arrived)
        self._share.arrive(request.scheduling.tenant)
        if is_held:
            self._held.add(request.request_id)
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Give a request its place, for the first time or again."""
        self._by_id[request.request_id] = request
        self.num_tokens += len(request.token_ids)
        if request.request_id not in self._held:
            self._line_up(request)

    def release(self, request_id: int) -> None:
        """A held request may start from now on, from the place of its arrival. Nothing happens if it has left."""
        if request_id in self._held:
            self._held.remove(request_id)
            self._line_up(self._by_id[request_id])

    def remove(self, request_id: int) -> Request | None:
        """Take a request out; None if it does not wait."""
        request = self._by_id.pop(request_id, None)
        if request is None:
            return None
        if request_id in self._held:
            self._held.remove(request_id)
        else:
            _take_out(self._flows, self._flow(request), request)
            if self._by_adapter is not None:
                _take_out(self._by_adapter, request.adapter, request)
        self.num_tokens -= len(request.token_ids)
        self._version += 1
        return request

    def start(self, request: Request) -> None:
        """Take a request out because it starts."""
        self.remove(request.request_id)
        if self._last_start is not None:
            self._start_interval_s += 0.1 * (self.now - self._last_start - self._start_interval_s)
        self._last_start = self.now

    def _line_up(self, request: Request) -> None:
        insort(self._flows.setdefault(self._flow(request), []), request, key=_key)
        if self._by_adapter is not None:
            insort(self._by_adapter.setdefault(request.adapter, []), request, key=_key)
        self._version += 1

    def _flow(self, request: Request) -> Flow:
        if not self._is_fair:
            return 0, None
        return request.scheduling.priority, None if request.num_preemptions else request.scheduling.tenant

    # ---- who is next ------------------------------------------------------------------------------------------------

    @property
    def head(self) -> Request | None:
        """Who is to start next."""
        return self.first(1)[0] if self._flows else None

    def first(self, most: int) -> list[Request]:
        """The first requests in the order in which they are to start."""
        if len(self._flows) <= 1:
            return next(iter(self._flows.values()), [])[:most]
        version = (self._version, self._share.version, most)
        if version[:2] != self._first_version[:2] or most > self._first_version[2]:
            self._first = fair_order(self._flows, most, self._share)
            self._first_version = version
        return self._first[:most]

    def candidates(self, most: int) -> list[Request]:
        """The first requests, and the first in place of those who have a share of their own."""
        candidates, reserved = self.first(most), self.reserved_priority
        if reserved is not None:
            own = [flow[0] for (priority, _), flow in self._flows.items() if priority <= reserved]
            if own and (first := min(own, key=_key)) not in candidates:
                return [*candidates, first]
        return candidates

    def first_of_adapters(self, can_start: Callable[[AdapterKey], bool]) -> list[Request]:
        """The first of each adapter that can start, and of none, by their places."""
        lines = (self._by_adapter or {}).items()
        return sorted((line[0] for key, line in lines if not key or can_start(key)), key=_key)

    def has_share_apart(self, request: Request, other: Request) -> bool:
        """Whether `request` has a share that `other` has no part in: it takes nothing that `other` could have."""
        reserved = self.reserved_priority
        return reserved is not None and request.scheduling.priority <= reserved < other.scheduling.priority

    def may_pass(self, request: Request, passed: Sequence[Request]) -> bool:
        """Whether a request may start before all of these, which are before it."""
        return all(
            self.has_share_apart(request, other)
            or (
                other.num_overtaken < MAX_OVERTAKEN
                and other.num_preemptions == 0
                and request.scheduling.priority <= other.scheduling.priority
            )
            for other in passed
        )

    # ---- room -------------------------------------------------------------------------------------------------------

    def room(self, num_free_slots: int, num_free_tokens: int) -> QueueRoom:
        """How many more requests would be taken now, told as long as they are few; prompts of one token, that is."""
        refusal = self._refusal(1, num_free_slots, num_free_tokens)
        if refusal is not None:
            return QueueRoom(0, refusal)
        num_requests = self._max_size + num_free_slots - len(self._by_id)
        if num_requests >= TOLD_BELOW:
            return MUCH_ROOM
        return QueueRoom(num_requests, self._full(f"max_queue_size is {self._max_size}"))

    @property
    def has_much_room(self) -> bool:
        """Whether that can be said whatever slots and tokens are free."""
        return len(self._by_id) + TOLD_BELOW <= self._max_size and self.num_tokens < self._max_tokens

    def _refusal(self, num_tokens: int, num_free_slots: int, num_free_tokens: int) -> str | None:
        """What to tell a newcomer with so many tokens; None if it is taken."""
        num_waiting = len(self._by_id)
        if num_waiting - num_free_slots >= self._max_size:
            return self._full(f"{num_waiting} requests wait, max_queue_size is {self._max_size}")
        if self.num_tokens + num_tokens > self._max_tokens + (num_free_tokens if num_free_slots else 0):
            return self._full(
                f"{self.num_tokens} tokens wait, {num_tokens} more would pass max_queue_tokens ({self._max_tokens})"
            )
        return None

    def _full(self, reason: str) -> str:
        # By then a tenth of the queue has started, if it goes on as it did.
        hint_s = min(max(1, math.ceil(self._start_interval_s * len(self) / 10)), _LONGEST_HINT_S)
        return f"the queue is full ({reason}); try again in about {hint_s} s"

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the queue's lines and counts agree."""
        lined_up = [request for flow in self._flows.values() for request in flow]
        for name, flow in self._flows.items():
            assert flow, "an empty line"
            assert flow == sorted(flow, key=_key), "a line is out of order"
            assert all(self._flow(request) == name for request in flow), "the wrong line"
        for key, line in (self._by_adapter or {}).items():
            assert line == sorted((request for request in lined_up if request.adapter == key), key=_key), "adapters"
        ids = [*(request.request_id for request in lined_up), *self._held]
        assert sorted(ids) == sorted(self._by_id), "a request waits twice, or nowhere"
        assert self.num_tokens == sum(len(request.token_ids) for request in self._by_id.values()), "queued tokens"


class Deadlines:
    """Until when requests are willing to wait, as a heap. Those of requests that have ended stay in it until they are
    due, or until most have. Ending a request is the scheduler's work."""

    def __init__(self, config: EngineConfig) -> None:
        """The config's limits are for requests that set none of their own."""
        self._timeout_ms = config.timeout_ms
        self._queue_timeout_ms = config.queue_timeout_ms
        self._heap: list[tuple[float, int, int, bool, Request]] = []  # due, number, milliseconds, is of the queue
        self._num_added = 0
        self._most = 1024  # the heap is swept beyond this size

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request that has just arrived."""
        own = request.scheduling
        self._push(request, own.timeout_ms or self._timeout_ms, is_queue=False)
        self._push(request, own.queue_timeout_ms or self._queue_timeout_ms, is_queue=True)

    def due(self, now: float) -> Iterator[tuple[Request, str]]:
        """Requests whose time is over, with what to tell their clients. End each before asking for the next."""
        while self._heap and self._heap[0][0] <= now:
            _, _, timeout_ms, is_queue, request = heapq.heappop(self._heap)
            if not _is_watched(request, is_queue):
                continue
            if is_queue or request.status is RequestStatus.WAITING:
                name = "queue_timeout_ms" if is_queue else "timeout_ms"
                yield request, f"timed out after {timeout_ms} ms in the queue ({name}); try again later"
            else:
                yield request, f"timed out after {timeout_ms} ms (timeout_ms) before its last token"

    def _push(self, request: Request, timeout_ms: int | None, is_queue: bool) -> None:
        if timeout_ms is None:
            return
        self._num_added += 1
        due = request.arrival_time + timeout_ms / 1000
        heapq.heappush(self._heap, (due, self._num_added, timeout_ms, is_queue, request))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if _is_watched(entry[4], entry[3])]
            heapq.heapify(self._heap)
            self._most = max(1024, 2 * len(self._heap))


def _is_watched(request: Request, is_queue: bool) -> bool:
    """Whether the deadline can still be missed; the queue's ends when the request runs for the first time."""
    return request.status is RequestStatus.WAITING if is_queue else not request.status.is_finished
