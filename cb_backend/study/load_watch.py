"""Whether the machine did other work while a study measured: figures then include waiting for its processors."""

from __future__ import annotations

import resource

from cb_backend.support.process_watch import machine_cpu_seconds

BUSY_SHARE = 0.1  # of the machine's CPU time, by others


class LoadWatch:
    """Counts from its making on."""

    def __init__(self) -> None:
        self._machine, self._own = machine_cpu_seconds(), _own_cpu_seconds()

    def share_of_others(self) -> float | None:
        """Of the machine's CPU seconds since the start; None where that cannot be known."""
        now = machine_cpu_seconds()
        if self._machine is None or now is None or now[1] <= self._machine[1]:
            return None
        others = now[0] - self._machine[0] - (_own_cpu_seconds() - self._own)
        return max(others, 0.0) / (now[1] - self._machine[1])

    def warnings(self) -> list[str]:
        share = self.share_of_others()
        if share is None or share < BUSY_SHARE:
            return []
        return [
            f"the machine was {share:.0%} busy with other work; figures include waiting for its CPU. Run the study"
            " again when it is idle (--cpu-time counts this process alone, on a CPU)"
        ]


def _own_cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
