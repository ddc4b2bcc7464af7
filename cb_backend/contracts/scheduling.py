"""How one request wants to be treated beside others: its place in the queue, its patience, whose cache it shares.

Like `request_params`, but for the scheduler: nothing here changes which tokens come out. This module checks values;
reading them from the wire is `front_end`'s work.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cb_backend.contracts.errors import InvalidRequestError

MAX_PRIORITY = 100  # either sign
MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000
MAX_NAME_BYTES = 256

Rank = tuple[int, float]  # a place in the queue, but for what tells equal ones apart; the least is first


class SchedulingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Travels to the engine as it is. None: what the engine's configuration says."""

    priority: int = 0  # lower = earlier, as in vLLM; requests of one priority are served in order of arrival
    timeout_ms: int | None = None  # the whole request, from its arrival at the engine
    queue_timeout_ms: int | None = None  # until it runs for the first time
    cache_salt: str = ""  # cached prefixes are shared only between requests of one salt
    tenant: str = ""  # requests of one priority start in turns of their tenants; all that name none are one

    def rank(self, arrival: float, aging_s: float) -> Rank:
        """Where a request belongs that arrives at this time. aging_s: `priority_aging_s`."""
        return (0, arrival + self.priority * aging_s) if aging_s else (self.priority, arrival)

    def within(self, timeout_us: int) -> SchedulingParams:
        """The same with a timeout in microseconds that the request carries elsewhere (0: none); the shorter counts."""
        if timeout_us <= 0:
            return self
        timeout_ms = min(-(-timeout_us // 1000), self.timeout_ms or MAX_TIMEOUT_MS)
        return msgspec.structs.replace(self, timeout_ms=timeout_ms)

    def check(self) -> None:
        """Raise `InvalidRequestError` naming the first value that is out of range."""
        _check_int("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        for name in ("timeout_ms", "queue_timeout_ms"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, 1, MAX_TIMEOUT_MS)
        for name in ("cache_salt", "tenant"):
            if len(getattr(self, name).encode(errors="surrogatepass")) > MAX_NAME_BYTES:
                raise InvalidRequestError(f"{name} has more than {MAX_NAME_BYTES} bytes; shorten it")


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}")
