"""A long, mixed load on a real server; memory, files, threads and shared memory must stay flat, canaries exact.

    python -m tests.faults.soak --minutes 120 --streams 64
    python -m tests.faults.soak --minutes 5 --leak            # a control that must fail: 4 KiB are kept at each step

Prompts and answers need 120 % of the KV blocks, a tenth of the requests is cancelled, one in fifty is bad. After a
warm-up (a third of the time) every process is measured each 2 s. A figure fails if it grows by more than the limit and
the growth is not within three standard errors of none. Exit code 0: flat, nothing lost, nothing wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.history import Item
from tests.faults.processes import Held, held_by, shared_memory_mb, slope_per_hour
from tests.faults.world import World, make_plan, world
from tests.server.tiny_checkpoint import Reference, write_tiny_checkpoint

SAMPLE_S = 2.0
WARM_UP_SHARE = 1 / 3
BLOCK_SIZE = 16
MB_PER_HOUR = 2.0  # of the engine and each front end
SERVER_MB_PER_HOUR = 20.0  # of the server's own process, whose growth is not ours: reported, and bounded
SETTLING_MB = 3.0  # allocators still settle within a short run
COUNT_SLACK = 4  # threads and files that come and go with connections


@dataclass
class Series:
    """One process over time."""

    name: str
    times: list[float] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)


def num_blocks_for(plan: list[Item], reference: Reference, num_streams: int, demand: float) -> int:
    """A pool of which `num_streams` average requests, half done on average, need `demand` times all."""
    sizes = [reference.num_tokens(item.prompt) + item.max_tokens / 2 for item in plan]
    return int(num_streams * (sum(sizes) / len(sizes)) / BLOCK_SIZE / demand)


def watch(made: World, seconds: float) -> tuple[list[Series], list[float]]:
    """Sample until the time is over; the warm-up is left out."""
    pids = {"server": made.server.process.pid, "engine": made.engine()}
    pids |= {f"front end {i}": pid for i, pid in enumerate(made.stubs())}
    series = {name: Series(name) for name in pids}
    shared: list[float] = []
    begin = time.monotonic()
    while (elapsed := time.monotonic() - begin) < seconds:
        time.sleep(SAMPLE_S)
        if elapsed < seconds * WARM_UP_SHARE:
            continue
        shared.append(shared_memory_mb(list(pids.values())))
        for name, pid in pids.items():
            held = held_by(pid)
            if held is None:
                made.notes.append(f"the process of the {name} has ended")
                return list(series.values()), shared
            series[name].times.append(time.monotonic())
            series[name].held.append(held)
    return list(series.values()), shared


def judge_memory(series: Series) -> tuple[str, bool]:
    """A line, and whether the process stayed flat."""
    slope, error = slope_per_hour(series.times, [held.memory_mb for held in series.held])
    hours = (series.times[-1] - series.times[0]) / 3600
    limit = SERVER_MB_PER_HOUR if series.name == "server" else MB_PER_HOUR
    growth = slope * hours
    is_flat = growth <= limit * hours + SETTLING_MB or slope - 3 * error <= 0
    first, last = series.held[0], series.held[-1]
    files, threads = last.num_files - first.num_files, last.num_threads - first.num_threads
    is_flat &= files <= COUNT_SLACK and threads <= COUNT_SLACK
    line = (
        f"{series.name:12} {first.memory_mb:8.1f} MB -> {last.memory_mb:8.1f} MB   {slope:+8.2f} +- {error:.2f} MB/h"
        f"   files {first.num_files} {files:+d}   threads {first.num_threads} {threads:+d}"
    )
    return line, is_flat


def report(made: World, all_series: list[Series], shared: list[float], seconds: float) -> Iterator[str]:
    """Lines to print; those that tell of a failure begin with '!'."""
    for series in all_series:
        line, is_flat = judge_memory(series)
        yield ("  " if is_flat else "! grows: ") + line
    half = max(len(shared) // 2, 1)
    yield f"  shared memory {max(shared[:half]):.1f} MB, then {max(shared[half:] or shared):.1f} MB at most"
    if max(shared[half:] or shared) > max(shared[:half]) + 1.0:
        yield "! grows: shared memory"
    verdict = made.judge()
    counts = verdict.counts
    yield (
        f"  {counts['requests']} requests in {seconds / 60:.1f} min: {counts['good']} good, {counts['cancelled']}"
        f" cancelled, {counts['bad']} bad, {counts['errors']} errors, {verdict.num_lost} lost, {verdict.num_wrong}"
        f" wrong; canaries {counts['canaries']}, of them not exact {counts['canary errors']}"
    )
    yield from (f"! {problem[:300]}" for problem in verdict.problems[:20])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--front-ends", type=int, default=2)
    parser.add_argument("--demand", type=float, default=1.2, help="of KV blocks, as a share of the pool")
    parser.add_argument("--leak", action="store_true", help="the control that must fail")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep histories in this folder, which must not exist")
    options = parser.parse_args(arguments)
    if options.minutes < 0.5 or options.streams < 1:
        parser.error("--minutes must be at least 0.5 and --streams at least 1")
    seconds = options.minutes * 60
    with tempfile.TemporaryDirectory(prefix="cb-soak-", dir="/tmp") as temporary:
        checkpoint = write_tiny_checkpoint(Path(temporary) / "checkpoint")
        reference = Reference(checkpoint)
        plan = make_plan(reference)
        num_blocks = num_blocks_for(plan, reference, options.streams, options.demand)
        print(f"{num_blocks} blocks for {options.streams} streams", flush=True)
        load = ("--streams", str(options.streams), "--cancel-fraction", "0.1", "--bad-fraction", "0.02")
        server = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": num_blocks, "swap_space": 0.01}
        lengths = {"max_num_seqs": options.streams, "max_model_len": num_blocks * BLOCK_SIZE}
        arguments_of_server = {**server, **lengths, "front_ends": options.front_ends}
        with world(
            checkpoint, plan, options.keep or Path(temporary) / "w", options.seed, load, **arguments_of_server
        ) as made:
            if options.leak:
                made.faults.write("leak", 1 << 40)
            all_series, shared = watch(made, seconds)
            preemptions = made.server.gauge("cb_preemptions_total", "llm")
            swapped = made.server.gauge("cb_swapped_in_requests_total", "llm")
            made.load.stop()
            made.server.wait_idle(30.0)
            lines = list(report(made, all_series, shared, seconds))
        lines.append(f"  preemptions {preemptions:.0f}, of them swapped {swapped:.0f}")
        if not preemptions:
            lines.append("! nothing was preempted: the pool is too large for this load")
        print("\n".join(lines))
    is_clean = not any(line.startswith("!") for line in lines)
    print("flat" if is_clean else "NOT flat")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
