"""Static batching, which in-flight batching is compared with. Nothing serves like that.

A policy of the scheduler (`engine.scheduler.admission`) that a study gives to the engines it makes.
"""

from __future__ import annotations

from collections.abc import Iterable

from cb_backend.contracts.request import Request
from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.engine.scheduler.parts import Parts


class StaticAdmission:
    """A batch is chosen when nothing runs, and nobody joins until all of it have ended.

    The batch takes as many requests as have slots and whose full lengths fit the cache together, as a server must
    that cannot preempt. It is kinder than most static servers: rows that have ended are not computed any more.
    """

    is_continuous = False

    def __init__(self, parts: Parts) -> None:
        self._kv = parts.kv
        self._table = parts.table
        self._queue = parts.queue
        self._members: set[int] = set()  # request ids of the current batch

    def may_admit(self, head: Request) -> bool:
        if self._table.num_running == 0 and head.request_id not in self._members:
            self._members = self._choose(self._queue)
        return head.request_id in self._members

    def num_reserved_blocks(self, request: Request) -> int:
        return 0

    def most_reserved_blocks(self, request: Request) -> int:
        return 0

    def _choose(self, waiting: Iterable[Request]) -> set[int]:
        members: set[int] = set()
        num_blocks_left = self._kv.num_usable_blocks
        for request in waiting:
            num_blocks_left -= self._kv.num_blocks_for(request.max_total_tokens)
            if num_blocks_left < 0 or len(members) == self._table.num_slots:
                break
            members.add(request.request_id)
        return members


# Under their names in measured results.
POLICIES: dict[str, PolicyKind] = {"fcfs": ContinuousAdmission, "static": StaticAdmission}
