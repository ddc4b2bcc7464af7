"""Many scenarios on all cores: what happened in them, and which of them failed.

Workers are started anew (not forked), so that nothing of the calling process is in them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from multiprocessing.pool import Pool
from pathlib import Path

from cb_backend.support.fault_points import POINTS
from tests.simulation.draw import AS_DRAWN, Kind, make_scenario
from tests.simulation.nth_failure import points_failing
from tests.simulation.ranges import Key, RangeLog
from tests.simulation.scenario import CANCEL_STATES, STEP_TRAITS
from tests.simulation.world import World

# Least number of scenarios in a thousand in which something happens: less would mean that they no longer test what they
# claim. Only what could have gone wrong is counted: a preempted request that came back, a reused block of a newcomer, a
# failure while somebody waits for an answer (once a scenario and point), a request that found no free blocks.
# Preemption is rarer by a tenth since two of five models have several groups of layers, whose windows give blocks back.
LEAST_SHARE = {
    "with preemption": 480, "with swap": 300, "with a prefix hit": 500, "with a full cache": 500, "with faults": 200,
    "with tenants": 330, "with text stops": 400, "with an engine death": 100, "with adapters": 200,
    "over two ranks": 10, "with a lost rank": 2,
    **{f"fault: {point}": 8 for point in POINTS},
}  # fmt: skip
LEAST_PER_THOUSAND = {
    "ended: stop": 1000, "ended: length": 2500, "failed rows": 200, "timed out: waiting": 300,
    "timed out: running": 100, "refused: grammar": 100, "guided steps": 2000,
    "refused: adapter": 40, "adapter loads": 800, "steps of several adapters": 800,
    "refused: too long": 80, "refused: queue full": 150, "overtaken": 400, "resumed": 300, "stalled": 2000,
    "chunks": 3000, "whole prompts beyond the budget": 80, "front end deaths": 40, "cache resets": 100,
    "waits for a block": 200, "waits for a prefix": 200, "held back by a share": 300,
    **{f"failed step: {trait}": 3 for trait in STEP_TRAITS},
    **{f"cancelled: {state}": 20 for state in CANCEL_STATES},
}  # fmt: skip


@dataclass
class Sweep:
    """Results of some seeds."""

    num_seeds: int = 0
    seconds: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)  # by seed
    kind: Kind = AS_DRAWN

    def missing(self) -> dict[str, tuple[int, int]]:
        """What happened too rarely: (found, wanted). Few seeds promise nothing, and worlds that are not as they were
        drawn neither: with several groups memory is less scarce."""
        if self.num_seeds < 500 or self.kind != AS_DRAWN:
            return {}
        least = {**LEAST_SHARE, **LEAST_PER_THOUSAND}
        wanted = {name: int(value * self.num_seeds / 1000) for name, value in least.items()}
        return {name: (self.counters[name], n) for name, n in wanted.items() if self.counters[name] < n}


def run_seed(seed: int, kind: Kind = AS_DRAWN) -> Counter[str]:
    """One scenario; also counts that it was one with preemptions, hits, ... Raises what it broke."""
    scenario = make_scenario(seed, kind)
    found = World(scenario, four_bit_hash if seed % 16 == 15 else None).run()
    faults = any(name.startswith("fault") for name in found)
    is_in = {
        "with preemption": found["resumed"], "with swap": found["swap ins"], "with a full cache": found["full"],
        "with a prefix hit": found["prefix hit tokens"], "with faults": faults,
        "with tenants": len({arrival.scheduling.tenant for arrival in scenario.arrivals}) > 1,
        "with text stops": any(arrival.params.stop for arrival in scenario.arrivals),
        "with an engine death": found["engine deaths"],
        "with adapters": found["adapter loads"],
        "over two ranks": scenario.config.tensor_parallel_size > 1, "with a lost rank": found["lost ranks"],
    }  # fmt: skip
    found.update({name: 1 for name, happened in is_in.items() if happened})
    found[f"groups: {len(scenario.windows)}"] = 1
    return found


def four_bit_hash(parent_digest: bytes, content: bytes) -> bytes:
    """M4: nearly every lookup meets another block's digest."""
    return bytes([zlib.crc32(parent_digest + content) % 16])


def _run_some(seeds: Sequence[int], kind: Kind) -> tuple[Counter[str], dict[int, str]]:
    counters: Counter[str] = Counter()
    failures = {}
    for seed in seeds:
        try:
            counters += run_seed(seed, kind)
        except Exception as error:
            failures[seed] = f"{type(error).__name__}: {error}"
    return counters, failures


def run_seeds(
    seeds: range,
    num_jobs: int = 0,
    limit_s: float = float("inf"),
    tell: Callable[[Sweep], None] = lambda sweep: None,
    kind: Kind = AS_DRAWN,
    log: Path | None = None,
) -> Sweep:
    """Run the seeds on all cores, or on `num_jobs`; stop handing out new ones after `limit_s` seconds.

    `tell` is called with what is known so far, now and then. What the file
    `log` knows already is not run again, and counts; the rest is written into it, range by range (see `ranges`).
    """
    num_jobs = num_jobs or _num_cores()
    size = max(1, min(50, len(seeds) // (4 * num_jobs) or 1))
    ranges = RangeLog(log, Key.of_this_checkout(str(kind)))
    known = ranges.known
    parts = list(known.left_of(seeds, size))
    sweep, began = Sweep(len(known.seeds), 0.0, known.counters, known.failures, kind), time.perf_counter()
    with _workers(num_jobs) as pool:
        results = pool.imap(partial(_run_some, kind=kind), parts)
        for part, (counters, failures) in zip(parts, results, strict=True):
            ranges.note(part, counters, failures)
            sweep.counters += counters
            sweep.failures.update(failures)
            sweep.num_seeds += len(part)
            sweep.seconds = time.perf_counter() - began
            tell(sweep)
            if sweep.seconds > limit_s:
                pool.terminate()
                break
    return sweep


def _workers(num_jobs: int) -> Pool:
    return multiprocessing.get_context("spawn").Pool(num_jobs, initializer=_collect_seldom)


def _collect_seldom() -> None:
    """A world makes little garbage that is in circles, and what was imported is none: looking often costs a tenth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def run_nth_failures(num_jobs: int, most: int, num_scenarios: int) -> tuple[int, dict[str, str]]:
    """For each point and scenario: fail its 1st, 2nd, ... time until it is not reached any more, or `most` times.

    Returns how many runs there were, and what broke.
    """
    num_runs, failures = 0, {}
    work = [(point, index, most) for point, index in product(POINTS, range(num_scenarios))]
    with _workers(num_jobs or _num_cores()) as pool:
        for runs, broken in pool.starmap(points_failing, work, chunksize=1):
            num_runs += runs
            failures.update(broken)
    return num_runs, failures
