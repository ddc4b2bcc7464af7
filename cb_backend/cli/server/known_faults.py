"""Faults of server releases that a configuration can meet, so that who starts one knows before it happens.

A table; each row was met on a real server. That it is gone stands in a release's notes, that it is still there in a
release's source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cb_backend.cli.server.local_server import Version
from cb_backend.cli.server.model_repository import is_ours
from cb_backend.serving.server_arguments import is_on


@dataclass(frozen=True, slots=True)
class Configuration:
    """What decides whether a fault can be met."""

    arguments: dict[str, str]  # of the server's command line
    own_python_models: Sequence[str] = ()  # source texts of Python models that are not this package's

    @property
    def can_load_again(self) -> bool:
        """Whether a model can be loaded while its predecessor still runs."""
        return self.arguments.get("model-control-mode", "none") != "none"


@dataclass(frozen=True, slots=True)
class Fault:
    """`until`: the first release that is without it or has not been looked at, which of both `span` says."""

    until: Version
    span: str
    text: str
    can_be_met: Callable[[Configuration], bool]


STREAM_CLOSES_UNTIL: Version = (2, 52)
FAULTS = (
    Fault(
        (2, 68),
        "gone in release 26.04",
        "a gRPC client that sends the header triton_grpc_error can crash it; leave the header out",
        lambda it: is_on(it.arguments, "allow-grpc"),
    ),
    Fault(
        (2, 71),
        "still in release 26.06",
        "a Python model of yours makes metrics: loading it again while it runs can crash the server, unless a label of "
        "them differs with every load; unload it first, or start with --allow-metrics=false",
        lambda it: (
            is_on(it.arguments, "allow-metrics")
            and it.can_load_again
            and any("MetricFamily(" in source for source in it.own_python_models)
        ),
    ),
    Fault(
        (2, 64),
        "gone in release 25.12",
        "a model stays ready though the process of its front end has died (an engine that dies is started again); "
        "watch answers or cb_* metrics, not readiness alone",
        lambda it: True,
    ),
    Fault(
        STREAM_CLOSES_UNTIL,
        "later releases were not tried",
        "a gRPC stream that is cancelled just as it ends can keep its model for ever: an unload stays UNLOADING, and a "
        "stop takes all of --exit-timeout-secs and gives exit code 1, though every request has ended; under streams "
        "that are cancelled by the thousand it was seen to hang and to crash, whatever the backend",
        lambda it: is_on(it.arguments, "allow-grpc"),
    ),
    Fault(
        (2, 71),
        "still in release 26.06",
        "after a load that fails over a loaded model, which serves on, a stop takes all of --exit-timeout-secs and "
        "gives exit code 1, though every request has ended",
        lambda it: it.can_load_again,
    ),
)


def known_faults(version: Version | None, configuration: Configuration) -> list[str]:
    """A line for each fault that this server has and this configuration can meet; none for an unknown version."""
    if version is None:
        return []
    name = ".".join(map(str, version))
    return [
        f"known fault of this server ({name}; {fault.span}): {fault.text}"
        for fault in FAULTS
        if version < fault.until and fault.can_be_met(configuration)
    ]


def own_python_models(repository: Path) -> list[str]:
    """Source texts of the Python models of a repository that are not this package's."""
    doors = sorted(repository.glob("*/*/model.py"))
    return [door.read_text(encoding="utf-8", errors="replace") for door in doors if not is_ours(door.parent)]
