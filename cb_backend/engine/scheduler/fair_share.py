"""Whose turn it is among tenants of one priority: the one that has been served the fewest tokens so far.

Every tenant has a counter of tokens served: prompt tokens that were computed and output tokens. A request is charged at
its start with its prompt and the output that is expected of it, and settled with what it really was at its end. A
tenant that comes (back) to the queue starts at the virtual time, so nobody saves up idle time, and nobody washes a debt
away by leaving for a moment. The virtual time moves on by the tokens served, divided by the tenants that share them; so
whoever waits is overtaken by only so much, even if new tenants keep coming. (The idea: start-time fair queuing, and
the virtual token counter of Sheng et al., OSDI 2024.) This module does not know slots, blocks or why somebody starts.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cb_backend.contracts.request import QueueKey, Request

Flow = tuple[int, str | None]  # priority, tenant; None: requests that were preempted, whoever sent them

MAX_REMEMBERED = 1024  # tenants without open requests whose debt is kept


@dataclass(slots=True)
class _Account:
    num_served: float  # tokens; never below the virtual time at which the tenant last came to the queue
    num_open: int = 0  # requests waiting or running
    num_waiting: int = 0  # of them, those that have not started yet


class FairShare:
    """Counters of the tenants. Their number is bounded by the open requests and `MAX_REMEMBERED`."""

    def __init__(self) -> None:
        self.virtual_time = 0.0  # tokens served to a tenant that always had its share
        self.version = 0  # changes with every counter
        self._accounts: dict[str, _Account] = {}  # of tenants with open requests
        self._debts: dict[str, float] = {}  # counters above the virtual time, of tenants without

    def __len__(self) -> int:
        return len(self._accounts) + len(self._debts)

    def num_served(self, tenant: str | None) -> float:
        """What a tenant's turn goes by. Preempted requests (None) come before everybody."""
        if tenant is None:
            return float("-inf")
        if tenant in self._accounts:
            return self._accounts[tenant].num_served
        return max(self._debts.get(tenant, 0.0), self.virtual_time)

    def arrive(self, tenant: str) -> None:
        """A request of the tenant has come to the queue for the first time."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self._debts.pop(tenant, 0.0))
        if account.num_waiting == 0:
            account.num_served = max(account.num_served, self.virtual_time)
        account.num_open += 1
        account.num_waiting += 1
        self.version += 1

    def start(self, request: Request, num_tokens: float) -> None:
        """A request runs for the first time and is expected to cost so many tokens."""
        account = self._accounts[request.scheduling.tenant]
        self.virtual_time = max(self.virtual_time, min(a.num_served for a in self._accounts.values() if a.num_waiting))
        account.num_waiting -= 1
        account.num_served += num_tokens
        request.num_charged_tokens = num_tokens
        self.version += 1

    def end(self, request: Request, num_tokens: int, has_started: bool) -> None:
        """A request has ended, after `num_tokens` computed prompt tokens and output tokens."""
        tenant = request.scheduling.tenant
        account = self._accounts[tenant]
        account.num_waiting -= not has_started
        account.num_served += num_tokens - request.num_charged_tokens
        self.virtual_time += num_tokens / len(self._accounts)
        account.num_open -= 1
        if account.num_open == 0:
            del self._accounts[tenant]
            if account.num_served > self.virtual_time:  # who owes nothing is the same as unknown
                self._debts[tenant] = account.num_served
                if len(self._debts) > MAX_REMEMBERED:
                    self._forget()
        self.version += 1

    def check_integrity(self, waiting: Sequence[Request], running: Sequence[Request]) -> None:
        """Raise `AssertionError` unless the accounts count these requests."""
        fresh = [request.scheduling.tenant for request in waiting if not request.num_preemptions]
        every = [request.scheduling.tenant for request in (*waiting, *running)]
        for tenant, account in self._accounts.items():
            assert account.num_waiting == fresh.count(tenant), f"waiting requests of tenant {tenant!r}"
            assert account.num_open == every.count(tenant), f"open requests of tenant {tenant!r}"
        assert set(every) == self._accounts.keys(), "a tenant has no account, or one for nothing"

    def _forget(self) -> None:
        """Forget the half of the debts that is least."""
        for tenant in sorted(self._debts, key=self._debts.__getitem__)[: MAX_REMEMBERED // 2]:
            del self._debts[tenant]


def fair_order(flows: Mapping[Flow, Sequence[Request]], most: int, share: FairShare) -> list[Request]:
    """The first `most` requests in the order in which they are to start. Each flow is sorted by `queue_key`.

    Whoever has the least `queue_key` of all is next if it is not of the most urgent class (its waiting has made up for
    its priority) or was preempted. Else it is the turn of the tenant with the fewest tokens served in that class.
    """
    if not flows:
        return []
    urgent = min(priority for priority, _ in flows)
    place = dict.fromkeys(flows, 0)
    charged: dict[str | None, float] = {tenant: share.num_served(tenant) for _, tenant in flows}
    by_key: list[tuple[QueueKey, Flow, int]] = [(flow[0].queue_key, name, 0) for name, flow in flows.items()]
    by_turn = [(charged[name[1]], key, name, 0) for key, name, _ in by_key if name[0] == urgent]
    heapq.heapify(by_key)
    heapq.heapify(by_turn)
    picked: list[Request] = []
    while len(picked) < most and by_key:
        _, name, index = by_key[0]
        if index != place[name]:
            heapq.heappop(by_key)
            continue
        if name[0] == urgent:
            while by_turn[0][3] != place[by_turn[0][2]]:
                heapq.heappop(by_turn)
            name = by_turn[0][2]
        request = flows[name][place[name]]
        picked.append(request)
        place[name] += 1
        if name[1] is not None:
            charged[name[1]] += len(request.token_ids)
        if place[name] < len(flows[name]):
            entry = (flows[name][place[name]].queue_key, name, place[name])
            heapq.heappush(by_key, entry)
            if name[0] == urgent:
                heapq.heappush(by_turn, (charged[name[1]], *entry))
    return picked
