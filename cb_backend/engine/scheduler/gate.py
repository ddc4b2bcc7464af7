"""What is done to the batch as a whole by whoever owns the engine: nobody new starts, the cache is forgotten.

While the gate is closed, whoever has begun goes on to the end, preempted ones too; all others keep their places.
"""

from __future__ import annotations

from cb_backend.engine.scheduler.admission import Admission
from cb_backend.engine.scheduler.parts import Parts

SALT_BYTES = 16  # that a request's own salt takes at the beginning of `Request.cache_salt`


class Gate:
    """Of one scheduler."""

    def __init__(self, parts: Parts, admission: Admission) -> None:
        self._parts = parts
        self._admission = admission

    def close(self) -> None:
        self._admission.is_closed = True

    def open(self) -> None:
        self._admission.is_closed = False
        self._admission.try_again()

    @property
    def is_closed(self) -> bool:
        return self._admission.is_closed

    @property
    def num_running(self) -> int:
        """Those with a slot, and steps that have not come back."""
        return self._parts.table.num_running + len(self._parts.in_flight)

    @property
    def num_begun(self) -> int:
        """The same, and those who have to go on after a preemption."""
        return self.num_running + len(self.begun_waiting)

    @property
    def waiting(self) -> list[int]:
        """Ids of all who have no slot, in no order."""
        return [request.request_id for request in self._parts.queue.everyone]

    @property
    def begun_waiting(self) -> list[int]:
        """Of these, who has to go on after a preemption."""
        return [request.request_id for request in self._parts.queue.everyone if request.num_preemptions > 0]

    def forget_cache(self) -> None:
        """What the cache holds is lost. What is on the host stays."""
        self._parts.kv.reset_prefix_cache()

    def change_weights(self, old: bytes, new: bytes) -> None:
        """Nothing that was computed is reused: not by those who wait either, whose keys are of other weights from now
        on. `old` and `new` stand for the weights in these keys, behind the request's own salt."""
        self._parts.swap.forget_all()
        self._parts.kv.reset_prefix_cache()
        for request in self._parts.queue.everyone:
            salt = request.cache_salt
            begin = SALT_BYTES if request.scheduling.cache_salt else 0
            request.cache_salt = salt[:begin] + new + salt[begin + len(old) :]
            request.block_hashes.clear()
