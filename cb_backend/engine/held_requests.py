"""Requests that have arrived but cannot start yet, for something outside the engine's loop must come first.

They wait in the scheduler's queue like any other, where they can be cancelled and can time out, but hold no slot and
no blocks. This module does not know what they wait for: each has conditions that say when it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cb_backend.contracts.errors import CbError

# Asked now and then, with the time: True, it has come; False, not yet; an error: it will not come.
Condition = Callable[[float], CbError | bool]


class HeldRequests:
    """Not thread-safe: the engine's loop calls it."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Condition]] = {}  # by request id: those not met yet

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def hold(self, request_id: int, conditions: Sequence[Condition]) -> None:
        """Until all conditions are met, or one cannot be: ask `settled`."""
        self._waiting[request_id] = list(conditions)

    def forget(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)

    def settled(self, now: float) -> list[tuple[int, CbError | None]]:
        """Requests that need not wait any longer: None if they can start, else what to tell their clients."""
        done: list[tuple[int, CbError | None]] = []
        for request_id, conditions in list(self._waiting.items()):
            error: CbError | None = None
            while conditions and error is None:
                met = conditions[0](now)
                if met is False:
                    break
                error = met if isinstance(met, CbError) else None
                del conditions[0]
            else:
                del self._waiting[request_id]
                done.append((request_id, error))
        return done
