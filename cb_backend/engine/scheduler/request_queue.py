"""The requests that wait for a slot, in the order in which they are to start.

A request's place is fixed when it arrives: by its arrival time, moved by `priority_aging_s` seconds for each step of
priority. So a request of priority p is overtaken only by those that arrive within (p - q) * priority_aging_s seconds
after it and have a lower priority q: whoever waits long enough is first. Within the most urgent class tenants take
turns (`fair_share`). A preempted request keeps its place, which is before every newcomer of its priority. This module
does not know blocks, slots or steps; time is told to it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator

from cb_backend.contracts.errors import UnavailableError
from cb_backend.contracts.queue_room import MUCH_ROOM, TOLD_BELOW, QueueRoom
from cb_backend.contracts.request import QueueKey, Request
from cb_backend.engine.scheduler.fair_share import FairShare, Flow, fair_order

_LONGEST_HINT_S = 60


def _key(request: Request) -> QueueKey:
    return request.queue_key


def _flow(request: Request) -> Flow:
    return request.scheduling.priority, None if request.num_preemptions else request.scheduling.tenant


class RequestQueue:
    """Sorted by `Request.queue_key`. Only newcomers can be refused; a preempted request always has a place."""

    def __init__(
        self, max_size: int, max_tokens: int, priority_aging_s: float, share: FairShare, is_fair: bool = True
    ) -> None:
        """`is_fair` False: tenants do not count, and places are all there is."""
        self._max_size = max_size
        self._max_tokens = max_tokens
        self._aging_s = priority_aging_s
        self._share = share
        self._is_fair = is_fair
        self._sorted: list[Request] = []
        self._flows: dict[Flow, list[Request]] = {}  # the same requests, by priority and tenant, each sorted
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
        return len(self._sorted)

    def __iter__(self) -> Iterator[Request]:
        """By `queue_key`."""
        return iter(self._sorted)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_id

    @property
    def everyone(self) -> list[Request]:
        """In no order, held ones included."""
        return list(self._by_id.values())

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def head(self) -> Request | None:
        """Who is to start next."""
        return self.first(1)[0] if self._sorted else None

    def first(self, most: int) -> list[Request]:
        """The first requests in the order in which they are to start."""
        if not self._is_fair or len(self._flows) <= 1:
            return self._sorted[:most]
        version = (self._version, self._share.version, most)
        if version[:2] != self._first_version[:2] or most > self._first_version[2]:
            self._first = fair_order(self._flows, most, self._share)
            self._first_version = version
        return self._first[:most]

    def first_within(self, priority: int) -> Request | None:
        """The first in place of those with this `priority` value or a lower one."""
        return min((flow[0] for name, flow in self._flows.items() if name[0] <= priority), key=_key, default=None)

    def arrive(self, request: Request, num_free_slots: int, num_free_tokens: int, is_held: bool = False) -> None:
        """Queue a newcomer. Raises `UnavailableError` with a hint when to come back if the queue is full.

        A held one has its place, but is not seen until `release`.
        What free slots and free memory can take at once does not count as waiting, so that a burst at an idle engine
        is not refused.
        """
        refusal = self._refusal(len(request.token_ids), num_free_slots, num_free_tokens)
        if refusal is not None:
            self.num_refused += 1
            raise UnavailableError(refusal)
        priority, now = request.scheduling.priority, self.now
        self._num_arrived += 1
        request.arrival_time = now
        rank = (0, now + priority * self._aging_s) if self._aging_s else (priority, now)
        request.queue_key = (*rank, self._num_arrived)
        self._share.arrive(request.scheduling.tenant)
        if is_held:
            self._held.add(request.request_id)
            self._note(request)
        else:
            self.put_back(request)

    def release(self, request_id: int) -> None:
        """A held request may start from now on, from the place of its arrival. Nothing happens if it has left."""
        if request_id in self._held:
            self._held.remove(request_id)
            self._insert(self._by_id[request_id])

    def put_back(self, request: Request) -> None:
        """Queue a request that was here before."""
        self._note(request)
        self._insert(request)

    def _note(self, request: Request) -> None:
        self._by_id[request.request_id] = request
        self.num_tokens += len(request.token_ids)

    def _insert(self, request: Request) -> None:
        insort(self._sorted, request, key=_key)
        insort(self._flows.setdefault(_flow(request), []), request, key=_key)
        self._version += 1

    def remove(self, request_id: int) -> Request | None:
        """Take a request out; None if it does not wait."""
        request = self._by_id.pop(request_id, None)
        if request is not None:
            if request_id in self._held:
                self._held.remove(request_id)
            else:
                name = _flow(request)
                for line in (self._sorted, self._flows[name]):
                    del line[bisect_left(line, request.queue_key, key=_key)]
                if not self._flows[name]:
                    del self._flows[name]
            self.num_tokens -= len(request.token_ids)
            self._version += 1
        return request

    def start(self, request: Request) -> None:
        """Take a request out because it starts."""
        self.remove(request.request_id)
        if self._last_start is not None:
            self._start_interval_s += 0.1 * (self.now - self._last_start - self._start_interval_s)
        self._last_start = self.now

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the queue's order, lines and counts agree."""
        keys = [request.queue_key for request in self._sorted]
        assert keys == sorted(keys), "the queue is out of order"
        lined_up = sorted((request for flow in self._flows.values() for request in flow), key=_key)
        assert lined_up == self._sorted, "a request waits in no line or in two"
        assert all(_flow(request) == name for name, flow in self._flows.items() for request in flow), "the wrong line"
        assert len(self._by_id) == len(self._sorted) + len(self._held), "a request waits twice, or nowhere"
        assert self.num_tokens == sum(len(request.token_ids) for request in self._by_id.values()), "queued tokens"

    @property
    def has_much_room(self) -> bool:
        """Whether that can be said whatever slots and tokens are free."""
        return len(self._by_id) + TOLD_BELOW <= self._max_size and self.num_tokens < self._max_tokens

    def room(self, num_free_slots: int, num_free_tokens: int) -> QueueRoom:
        """How many more requests would be taken now, told as long as they are few; prompts of one token, that is."""
        refusal = self._refusal(1, num_free_slots, num_free_tokens)
        if refusal is not None:
            return QueueRoom(0, refusal)
        num_requests = self._max_size + num_free_slots - len(self._by_id)
        if num_requests >= TOLD_BELOW:
            return MUCH_ROOM
        return QueueRoom(num_requests, self._full(f"max_queue_size is {self._max_size}"))

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
