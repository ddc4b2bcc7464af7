"""Models that a server keeps by its own fault, so that its stop takes all of its time and gives exit code 1.

Two faults do this, with any backend (`test_faults_of_the_server.py` shows them with a model of 16 lines): a load that
fails over a loaded model is counted for ever, and 24.10 never lets go of a model of which a gRPC stream was cancelled
just as it ended. What can have met them is noted here, of one server; a stop that runs out of time is excused only if
the server says at its end that it has kept no more models than that, and nothing else.
"""

from __future__ import annotations

import re

from cb_backend.cli.server.known_faults import STREAM_CLOSES_UNTIL
from cb_backend.cli.server.local_server import Version

_LOADED = re.compile(r"successfully loaded '([^']+)'")
_NOT_LOADED = re.compile(r"failed to load '([^']+)' version ")
_AT_THE_END = re.compile(r"Timeout 0: Found (\d+) live models and (\d+) in-flight non-inference requests")
_OUT_OF_TIME = "Exit timeout expired"


class KeptModels:
    """Give it every line of the server's log, and in `cancelled` the models of gRPC streams that were cancelled."""

    def __init__(self, version: Version | None) -> None:
        self.cancelled: set[str] = set()
        self._keeps_cancelled = version is not None and version < STREAM_CLOSES_UNTIL
        self._loaded: set[str] = set()
        self._num_failed_loads = 0  # over a loaded model
        self._at_the_end: tuple[int, int] | None = None  # models and requests
        self._is_out_of_time = False

    def read(self, line: str) -> None:
        if match := _LOADED.search(line):
            self._loaded.add(match.group(1))
        elif match := _NOT_LOADED.search(line):
            self._num_failed_loads += match.group(1) in self._loaded
        elif match := _AT_THE_END.search(line):
            self._at_the_end = int(match.group(1)), int(match.group(2))
        self._is_out_of_time |= _OUT_OF_TIME in line

    def excuse(self, code: int) -> bool:
        """Whether nothing but these faults has made the server end with this exit code."""
        if code != 1 or not self._is_out_of_time or self._at_the_end is None:
            return False
        num_models, num_requests = self._at_the_end
        most = self._num_failed_loads + (len(self.cancelled) if self._keeps_cancelled else 0)
        return num_requests == 0 and 0 < num_models <= most
