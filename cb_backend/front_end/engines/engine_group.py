"""The engines of one model copy as a front end sees them: one client each, and a choice for every request.

A request lives and ends on the engine it was sent to; when that one dies, only its own requests do. How the choice is
made is `routing`'s business; how engines are kept running the supervisor's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from cb_backend.contracts.errors import UnavailableError
from cb_backend.contracts.messages import AddRequest, ModelInfo
from cb_backend.contracts.request import make_request_id
from cb_backend.front_end.engines.engine_client import ENGINE_GONE, EngineClient
from cb_backend.front_end.engines.request_sink import RequestSink
from cb_backend.front_end.engines.routing import choose_engine, prefix_key


class EngineGroup:
    """Sends requests to one of `members`. May be called from any thread."""

    def __init__(self, front_end_id: int, members: Sequence[EngineClient]) -> None:
        self.front_end_id = front_end_id
        self.members = tuple(members)
        self._counter = itertools.count(1)

    @property
    def is_ready(self) -> bool:
        """Whether some engine takes requests."""
        return any(member.is_ready for member in self.members)

    @property
    def info(self) -> ModelInfo | None:
        """What one engine says of the model; they are all alike."""
        return next((member.info for member in self.members if member.info is not None), None)

    @property
    def failure(self) -> str | None:
        """Why some engine cannot start or go on."""
        return next((member.failure for member in self.members if member.failure is not None), None)

    @property
    def silence_s(self) -> float:
        """Of the engine that has said nothing for the longest time, though it has requests."""
        return max(member.silence_s for member in self.members)

    def new_request_id(self) -> int:
        return make_request_id(self.front_end_id, next(self._counter))

    def check_room(self) -> None:
        """Raises `UnavailableError` if it is known before anything is done for a request that no queue takes it."""
        ready = [member for member in self.members if member.is_ready]
        if ready and all(member.room.is_full for member in ready):
            raise UnavailableError(ready[0].room.refuse())

    def submit(self, request: AddRequest, sink: RequestSink) -> None:
        """Send a request to an engine. Raises `UnavailableError` while there is none."""
        if len(self.members) == 1:
            self.members[0].submit(request, sink)
            return
        key = prefix_key(request.prompt_token_ids, request.scheduling.cache_salt, request.adapter)
        has_room = [member.is_ready and not member.room.is_full for member in self.members]
        if not any(has_room):  # whoever is asked refuses, and says why
            has_room = [member.is_ready for member in self.members]
        loads = [member.load if is_open else None for member, is_open in zip(self.members, has_room, strict=True)]
        while (engine := choose_engine(key, loads)) is not None:
            try:
                self.members[engine].submit(request, sink)
                return
            except UnavailableError:  # it has just gone
                loads[engine] = None
        raise UnavailableError(ENGINE_GONE)

    def cancel(self, request_ids: Iterable[int]) -> None:
        """End requests; their sinks hear nothing more. Unknown and finished ids are ignored."""
        request_ids = list(request_ids)
        for member in self.members:  # only the one that knows an id does anything about it
            member.cancel(request_ids)

    def close(self) -> None:
        for member in self.members:
            member.close()
