"""How a request waits for its adapter: held, without a slot or blocks, until the adapter is in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from cb_backend.contracts.adapters import AdapterKey, AdapterSource
from cb_backend.contracts.errors import CbError
from cb_backend.contracts.request import Request
from cb_backend.contracts.scheduling import Rank
from cb_backend.engine.adapters import READ_TIMEOUT_S, WITHOUT_ROOM, AdapterStore
from cb_backend.engine.held_requests import Condition


class AdapterWait:
    """A condition of a held request: met once its adapter is in host memory. `found` is told which one it is.

    The time that it may take begins when a thread is at its files; while it stands behind others, whenever one of
    these is done: many that are asked for at once are no fault of the disk. For room in memory it waits as long as its
    request does, in the queue's order (`adapter_line`).
    """

    def __init__(
        self,
        store: AdapterStore,
        source: AdapterSource,
        found: Callable[[AdapterKey], None],
        since: float,
        rank: Rank | None = None,
    ) -> None:
        """`rank`: the request's in the queue; None: that of its arrival, which is `since`."""
        self._store = store
        self._source = source
        self._found = found
        self._since = since
        self._num_before: int | None = WITHOUT_ROOM
        self._turn = store.line.new_turn(rank or (0, since))

    def leave(self) -> None:
        """Whoever asks is not there any more."""
        self._store.line.leave(self._turn)

    def __call__(self, now: float) -> CbError | bool:
        line = self._store.line
        try:
            key = self._store.find(self._source, now, self._turn)
        except CbError as refusal:
            return refusal
        if key is not None:
            line.leave(self._turn)
            line.pass_others(self._turn)
            self._found(key)
            return True
        num_before = self._store.turn_of(self._source)
        if num_before == WITHOUT_ROOM:
            line.wait(self._turn)
        else:
            line.leave(self._turn)
        if num_before != self._num_before or num_before == WITHOUT_ROOM:
            self._num_before, self._since = num_before, now
        if now - self._since > READ_TIMEOUT_S:
            return self._store.give_up(self._source)
        return False


def take_adapter(request: Request, key: AdapterKey) -> None:
    """The request goes through it from now on; it must not have started."""
    request.adapter = key
    request.cache_salt += b"lora" + key  # what is cached is of these weights


@contextmanager
def leaving(waits: Iterable[Condition]) -> Iterator[None]:
    """A request that is refused in here leaves the line for room, where others would be behind it."""
    try:
        yield
    except CbError:
        for wait in waits:
            if isinstance(wait, AdapterWait):
                wait.leave()
        raise


def adapter_wait(store: AdapterStore | None, request: Request, now: float, aging_s: float) -> list[Condition]:
    """Give the request the adapter that it wants, if it is known already, or say what it must wait for.
    store: None where there are no adapters. aging_s: `priority_aging_s`.

    Raises a `CbError` for one that is known not to be servable.
    """
    source = request.adapter_source
    if source is None or store is None:
        return []

    wait = AdapterWait(store, source, partial(take_adapter, request), now, request.scheduling.rank(now, aging_s))
    met = wait(now)
    if isinstance(met, CbError):
        raise met
    return [] if met else [wait]
