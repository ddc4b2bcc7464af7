"""The server's /metrics before and after a run: which counters moved, and how often requests were preempted."""

from __future__ import annotations

import re
import urllib.request
from typing import Any

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_TYPE = re.compile(r"^# TYPE (\S+) (\S+)")
MAX_COUNTERS = 40


def fetch(url: str, timeout_s: float = 30.0) -> str:
    """The text at `url`. Raises OSError."""
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return str(response.read().decode())


def counters(text: str, model: str | None = None) -> dict[str, float]:
    """Counters of a Prometheus text, summed over their labels; of one model where samples carry a model label."""
    kinds: dict[str, str] = {}
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if match := _TYPE.match(line):
            kinds[match[1]] = match[2]
        elif (match := _SAMPLE.match(line)) and kinds.get(match[1]) == "counter":
            is_other = model is not None and 'model="' in (match[2] or "") and f'model="{model}"' not in match[2]
            if not is_other:
                sums[match[1]] = sums.get(match[1], 0.0) + float(match[3])
    return sums


def difference(before: str, after: str, model: str, num_finished: int) -> dict[str, Any]:
    """Counters that moved between two fetches, and preemptions per finished request (None: no such counter)."""
    start, end = counters(before, model), counters(after, model)
    moved = {name: end[name] - start.get(name, 0.0) for name in sorted(end) if end[name] != start.get(name, 0.0)}
    preempting = [name for name in end if "preempt" in name and "token" not in name]
    num_preemptions = sum(end[name] - start.get(name, 0.0) for name in preempting) if preempting else None
    rate = None if num_preemptions is None else num_preemptions / max(1, num_finished)
    return {
        "num_preemptions": num_preemptions,
        "preemptions_per_request": rate,
        "counters": dict(list(moved.items())[:MAX_COUNTERS]),
    }
