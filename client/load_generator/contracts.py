"""What the parent and a client process tell each other: plain data, pickled over a pipe. Knows nobody's work."""

from __future__ import annotations

from dataclasses import dataclass, field

from cb_backend.traffic.workload import PlannedRequest

from .prompts import Vocabulary
from .records import RequestRecord
from .wire import WireOptions


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a process needs to know. Made by the parent, the same for all but `process` and `requests`."""

    process: int
    url: str
    wire: WireOptions
    vocabulary: Vocabulary
    seed: int
    requests: list[PlannedRequest]  # open loop: this process's share; closed loop: the whole list, taken in turn
    warm_up: list[PlannedRequest]
    num_streams: int | None  # closed loop: requests this process keeps in flight; None: open loop
    num_requests: int | None  # closed loop: bound over all processes; None: until duration_s
    duration_s: float | None  # after this nothing new is sent
    drain_timeout_s: float  # for the requests still open then
    request_timeout_s: float | None
    num_connections: int


@dataclass(frozen=True)
class Ready:
    """The process is connected and warmed up."""

    num_warm_up_ok: int
    warm_up_error: str | None = None


@dataclass(frozen=True)
class Progress:
    """Running totals of one process, and the records finished since the last message."""

    num_sent: int = 0
    num_done: int = 0
    num_failed: int = 0  # refused or error, part of num_done
    num_tokens: int = 0
    records: list[RequestRecord] = field(default_factory=list)


@dataclass(frozen=True)
class ClientHealth:
    """Whether the measuring process itself was quick enough to be believed."""

    process: int
    cpu_share: float  # CPU seconds of the process per second of the run; its event loop has one core
    loop_lags_s: list[float]  # how late the event loop woke, sampled all along


@dataclass(frozen=True)
class Done:
    """The last message: nothing is in flight any more."""

    progress: Progress
    health: ClientHealth
