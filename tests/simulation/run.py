"""Many random scenarios on all cores; prints what happened in them, and shrinks what fails into a permanent case.

python -m tests.simulation.run --seeds 20000 [--start 0] [--groups 2 7] [--adapters] [--ranks] [--jobs J] [--log FILE]
python -m tests.simulation.run --sum FILE ...       what the logs of several runs, on several machines, add up to
python -m tests.simulation.run --nth-failure        every fault point, failing at its 1st, 2nd, 3rd, ... time
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from tests.simulation.draw import Kind, make_scenario
from tests.simulation.ranges import Key, describe, totals
from tests.simulation.shrink import failure_of, keep, shrink
from tests.simulation.sweep import Sweep, run_nth_failures, run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="how many scenarios")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: one a core")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no new ones begin")
    parser.add_argument(
        "--groups", type=int, nargs="+", default=[], metavar="N",
        help="every world's model has one of these numbers of groups of layers, of which one keeps all; else as drawn",
    )  # fmt: skip
    parser.add_argument("--adapters", action="store_true", help="every world has adapters; else as drawn")
    parser.add_argument("--ranks", action="store_true", help="every world is over two ranks; else as drawn")
    parser.add_argument("--log", type=Path, help="what was found, range by range: seeds in it are not run again")
    parser.add_argument("--sum", type=Path, nargs="+", metavar="LOG", help="add up such files instead")
    parser.add_argument("--no-shrink", action="store_true", help="only print what fails")
    parser.add_argument("--nth-failure", action="store_true", help="the loop over all fault points instead")
    parser.add_argument("--most", type=int, default=1000, help="of that loop: longest n")
    parser.add_argument("--worlds", type=int, default=12, help="of that loop: how many worlds")
    options = parser.parse_args()
    if options.nth_failure:
        return _run_nth_failures(options)
    if options.sum:
        return _sum(options.sum)
    seeds = range(options.start, options.start + options.seeds)
    kind = Kind(tuple(options.groups), options.adapters, options.ranks)
    sweep = run_seeds(seeds, options.jobs, options.limit, _Progress(), kind, options.log)
    _show(sweep)
    if sweep.failures and not options.no_shrink:
        _shrink_first(sweep, kind)
    return bool(sweep.failures or sweep.missing())


class _Progress:
    """A line a minute, and one for each failure as soon as it is known."""

    def __init__(self) -> None:
        self._told_s = 0.0
        self._told: set[int] = set()

    def __call__(self, sweep: Sweep) -> None:
        for seed in sweep.failures.keys() - self._told:
            self._told.add(seed)
            print(f"seed {seed}: {sweep.failures[seed]}", flush=True)
        if sweep.seconds > self._told_s + 60:
            self._told_s = sweep.seconds
            print(f"{sweep.seconds:.0f} s: {sweep.num_seeds} seeds, {len(sweep.failures)} violations", flush=True)


def _sum(paths: list[Path]) -> int:
    found = totals(paths)
    print(describe(found, {key for key in found if key == Key.of_this_checkout(key.kind)}))
    return any(total.failures for total in found.values())


def _run_nth_failures(options: argparse.Namespace) -> int:
    began = time.perf_counter()
    num_runs, failures = run_nth_failures(options.jobs, options.most, options.worlds)
    for name, what in sorted(failures.items())[:20]:
        print(f"{name}: {what}")
    print(f"{num_runs} runs in {time.perf_counter() - began:.0f} s, {len(failures)} violations")
    return bool(failures)


def _show(sweep: Sweep) -> None:
    for name, count in sorted(sweep.counters.items()):
        print(f"{count:12,}  {name}")
    for name, (found, wanted) in sweep.missing().items():
        print(f"too rare: {name}: {found}, wanted {wanted}")
    cores = len(os.sched_getaffinity(0))
    print(
        f"{sweep.num_seeds} scenarios in {sweep.seconds:.1f} s ({sweep.num_seeds / max(sweep.seconds, 1e-9):.0f} a "
        f"second on {cores} cores), {sweep.counters['steps']:,} steps, {len(sweep.failures)} violations, "
        f"{len(sweep.missing())} rates missed"
    )


def _shrink_first(sweep: Sweep, kind: Kind) -> None:
    seed = min(sweep.failures)
    scenario = make_scenario(seed, kind)
    if failure_of(scenario) is None:
        print(f"seed {seed} fails only with colliding digests, and is not shrunk")
        return
    small = shrink(scenario)
    path = keep(small)
    print(f"seed {seed}, with {len(small.arrivals)} of {len(scenario.arrivals)} requests left, is kept in {path}")


if __name__ == "__main__":
    raise SystemExit(main())
