"""A long, mixed load on a real server; memory, files, threads and shared memory must stay flat, canaries exact.

    python -m tests.faults.soak --minutes 120 --streams 64
    python -m tests.faults.soak --minutes 5 --leak            # a control that must fail: 4 KiB are kept at each step

Prompts and answers need 120 % of the KV blocks, and nothing is held back for their growth, so that requests are
preempted; a tenth is cancelled, one in fifty is bad. After a warm-up (a third of the time, at most 20 minutes) every
process is measured each 2 s; `flatness` says what is flat, `patience` who waited too long behind others. The table has
a bound for each slope. Exit code 0: flat, nothing lost, nothing wrong, nobody starved, something preempted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cb_backend.engine.scheduler.admission import NO_RESERVE
from tests.faults import patience
from tests.faults.flatness import Figure, Series, shared_memory_figure, table
from tests.faults.history import Item
from tests.faults.processes import held_by, shared_memory_mb
from tests.faults.world import World, make_plan, world
from tests.server.tiny_checkpoint import Reference, write_tiny_checkpoint

SAMPLE_S = 2.0
PROGRESS_S = 60.0
WARM_UP_SHARE, MAX_WARM_UP_S = 1 / 3, 1200.0
BLOCK_SIZE = 16
DEADLINE_S = 900.0  # of a client: an answer of 120 tokens must not fail because the machine is slow
MIN_PREEMPTED_SHARE = 0.05  # of the good requests


def num_blocks_for(plan: list[Item], reference: Reference, num_streams: int, demand: float) -> int:
    """A pool of which `num_streams` average requests, half done on average, need `demand` times all."""
    sizes = [reference.num_tokens(item.prompt) + item.max_tokens / 2 for item in plan]
    return int(num_streams * (sum(sizes) / len(sizes)) / BLOCK_SIZE / demand)


def watch(made: World, seconds: float) -> list[Figure]:
    """Sample until the time is over; the warm-up is left out."""
    pids = {"server": made.server.process.pid, "engine": made.engine()}
    pids |= {f"front end {i}": pid for i, pid in enumerate(made.stubs())}
    series = {name: Series(name) for name in pids}
    times: list[float] = []
    shared: list[float] = []
    begin, warm_up = time.monotonic(), min(seconds * WARM_UP_SHARE, MAX_WARM_UP_S)
    is_whole = True
    next_line = 0.0
    while is_whole and (elapsed := time.monotonic() - begin) < seconds:
        time.sleep(SAMPLE_S)
        if elapsed >= next_line:
            next_line = elapsed + PROGRESS_S
            print(f"{elapsed / 60:.0f} of {seconds / 60:.0f} min: {_now(pids)}", flush=True)
        if elapsed < warm_up:
            continue
        times.append(time.monotonic())
        shared.append(shared_memory_mb(list(pids.values())))
        for name, pid in pids.items():
            held = held_by(pid)
            if held is None:
                made.notes.append(f"the process of the {name} has ended")
                is_whole = False
                break
            series[name].times.append(times[-1])
            series[name].held.append(held)
    figures = [figure for one in series.values() for figure in one.figures()]
    return [*figures, shared_memory_figure(times, shared)]


def _now(pids: dict[str, int]) -> str:
    held = {name: held_by(pid) for name, pid in pids.items()}
    return ", ".join(f"{name} {one.memory_mb:.0f} MB" for name, one in held.items() if one is not None)


def report(made: World, figures: list[Figure], preemptions: float, num_streams: int, seconds: float) -> Iterator[str]:
    """Lines to print; those that tell of a failure begin with '!'."""
    yield from table(figures)
    verdict = made.judge()
    yield from patience.report(made.load.read(), num_streams)
    counts = verdict.counts
    yield (
        f"  {counts['requests']} requests in {seconds / 60:.1f} min: {counts['good']} good, {counts['cancelled']}"
        f" cancelled, {counts['bad']} bad, {counts['errors']} errors, {verdict.num_lost} lost, {verdict.num_wrong}"
        f" wrong; canaries {counts['canaries']}, of them not exact {counts['canary errors']}"
    )
    share = preemptions / max(counts["good"], 1)
    mark = "  " if share >= MIN_PREEMPTED_SHARE else "! "
    yield f"{mark}{preemptions:.0f} preemptions, {100 * share:.1f} % of the good requests"
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
        load += ("--deadline", str(DEADLINE_S))
        server = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": num_blocks, "swap_space": 0.01}
        lengths = {"max_num_seqs": options.streams, "max_model_len": num_blocks * BLOCK_SIZE}
        server["admission_reserve"] = NO_RESERVE
        arguments_of_server = {**server, **lengths, "front_ends": options.front_ends}
        with world(
            checkpoint, plan, options.keep or Path(temporary) / "w", options.seed, load, **arguments_of_server
        ) as made:
            if options.leak:
                made.faults.write("leak", 1 << 40)
            figures = watch(made, seconds)
            preemptions = made.server.gauge("cb_preemptions_total", "llm")
            swapped = made.server.gauge("cb_swapped_in_requests_total", "llm")
            made.load.stop(DEADLINE_S)
            made.server.wait_idle()
            lines = list(report(made, figures, preemptions, options.streams, seconds))
        lines.append(f"  {swapped:.0f} of the preempted requests came back from host memory")
        print("\n".join(lines))
    is_clean = not any(line.startswith("!") for line in lines)
    print("flat" if is_clean else "NOT flat")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
