"""Changes the code under test in small ways, one at a time, and counts how many of the changes the tests notice.

python -m tests.mutation.run [--modules scheduler block_pool ...] [--sample N] [--jobs J] [--journal FILE] [--json FILE]

Every mutant is a forked process (`serve`) in which the module is changed (`change`) and the tests named for it
(`targets`) run until the first failure. A mutant that hangs is noticed. Survivors are printed. Those that change
nothing that can be seen are listed in `equivalent.txt` with reasons, and are not tried. With a journal a run that was
stopped goes on where it was, and one after changes tries again only mutants of changed modules or under changed tests.
Needs the repository, numpy, msgspec, pyzmq, tokenizers, pytest and hypothesis; torch and transformers for `adapters`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.mutation.journal import Journal
from tests.mutation.mutate import Mutant, mutants
from tests.mutation.serve import HUNG, NOTICED, SKIPPED, SURVIVED, serve
from tests.mutation.targets import TARGETS, fingerprints, source_of

EQUIVALENT = Path(__file__).with_name("equivalent.txt")
PROGRESS_S = 20.0
# CPU seconds of one mutant, on its own clock: how busy the machine is does not matter. Twice what the tests take
# without a change, and some seconds for a new import; no more than this.
LONGEST_CPU_S = 60
LEAST_CPU_S = 3
FAILED = "failed"  # a process that tries changes has ended


def equivalents(text: str, module: str) -> set[tuple[str, str]]:
    """(line of source, change) of the module's mutants that no test can notice."""
    found = set()
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, source, what, reason = line.split(" | ")
        if name not in TARGETS or not reason.strip():
            raise ValueError(f"{line!r} must be: module | line of source | change | why; modules: {', '.join(TARGETS)}")
        if name == module:
            found.add((source, what))
    return found


def mutants_to_try(name: str) -> list[Mutant]:
    """All of the module but the equivalent ones. Raises `ValueError` if one that is listed does not exist any more."""
    found = mutants(source_of(TARGETS[name][0]).read_text())
    listed = equivalents(EQUIVALENT.read_text(), name)
    stale = listed - {(mutant.source, mutant.what) for mutant in found}
    if stale:
        raise ValueError(
            f"{EQUIVALENT.name} lists changes of {name} that cannot be made: {sorted(stale)}; mend the list"
        )
    return [mutant for mutant in found if (mutant.source, mutant.what) not in listed]


def try_out(target: str, work: list[Mutant], num_jobs: int, deadline: float) -> Iterator[tuple[Mutant | None, str]]:
    """(mutant, outcome) of all of them as they come, first of no mutant at all: unless that survives it is the last."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = zip(*(spawn.Pipe() for _ in range(min(num_jobs, len(work)))), strict=True)
    workers = [spawn.Process(target=serve, args=(target, pipe), daemon=True) for pipe in theirs]
    for worker, pipe in zip(workers, theirs, strict=True):
        worker.start()
        pipe.close()  # so that its end is seen
    asked: dict[Connection, Mutant | None] = {ours[0]: None}
    longest_cpu_s = LONGEST_CPU_S
    ours[0].send((None, longest_cpu_s))
    left = work[::-1]
    while asked:
        for pipe in wait(list(asked)):
            mutant = asked.pop(pipe)
            try:
                outcome, cpu_s = pipe.recv()
            except EOFError:
                outcome, cpu_s = FAILED, 0.0
            yield mutant, outcome
            if mutant is None:
                longest_cpu_s = min(longest_cpu_s, int(LEAST_CPU_S + 2 * cpu_s))
            if outcome == FAILED or (mutant is None and outcome != SURVIVED):
                return
        for pipe in ours:
            if pipe not in asked and left and time.time() < deadline:
                asked[pipe] = left.pop()
                pipe.send((asked[pipe], longest_cpu_s))
    yield from ((mutant, SKIPPED) for mutant in left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument(
        "--sample", type=int, default=0, help="at most so many mutants a module, drawn at random; 0: all"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no new ones begin")
    parser.add_argument("--journal", type=Path, help="outcomes so far, so that a run can be stopped and go on")
    parser.add_argument("--keep-noticed", action="store_true", help="do not try again what other tests noticed before")
    parser.add_argument("--json", type=Path, help="write the survivors here as well")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    began, results = time.perf_counter(), []
    deadline = time.time() + options.limit
    journal = Journal(options.journal)
    for name in options.modules:
        prints, work = fingerprints(name), []
        found = mutants_to_try(name)
        if options.sample and len(found) > options.sample:
            found = sorted(random.Random(0).sample(found, options.sample), key=lambda mutant: mutant.index)
        for mutant in found:
            known = journal.outcome(name, mutant, *prints, keep=NOTICED if options.keep_noticed else "")
            if known is None:
                work.append(mutant)
            else:
                results.append((name, mutant, known))
        random.Random(1).shuffle(work)  # so that a run that is cut short has seen something of all
        print(f"{name}: {len(found) - len(work)} mutants known, {len(work)} to try", flush=True)
        told = time.perf_counter()
        for num_tried, (mutant, outcome) in enumerate(try_out(name, work, options.jobs, deadline) if work else ()):
            if outcome == FAILED:
                print(f"a process that tries changes of {name} has ended, at {mutant}")
                return 2
            if mutant is None and outcome != SURVIVED:
                print(f"the tests of {name} fail without any change ({outcome}); mend them first")
                return 2
            if mutant is None:
                continue
            results.append((name, mutant, outcome))
            if outcome != SKIPPED:
                journal.note(name, mutant, *prints, outcome)
            if outcome == SURVIVED:
                print(f"survived in {name}, line {mutant.line}: {mutant.what}", flush=True)
            if time.perf_counter() - told > PROGRESS_S:
                told = time.perf_counter()
                print(f"{num_tried} of {len(work)}", flush=True)
    return _show(results, time.perf_counter() - began, options.json)


def _show(results: list[tuple[str, Mutant, str]], seconds: float, path: Path | None) -> int:
    survivors: dict[str, list[str]] = {}
    for name in (name for name in TARGETS if any(name == other for other, _, _ in results)):
        counts = Counter(outcome for other, _, outcome in results if other == name)
        num_tried = counts.total() - counts[SKIPPED]
        lines = sorted((m.line, m.what) for other, m, outcome in results if other == name and outcome == SURVIVED)
        survivors[name] = [f"{line}: {what}" for line, what in lines]
        print(
            f"{name:14} {num_tried - len(lines):4} of {num_tried:4} mutants noticed ({counts[HUNG]} hung, "
            f"{counts[SKIPPED]} not tried), {1 - len(lines) / max(num_tried, 1):.0%}"
        )
    for name, texts in survivors.items():
        for text in texts:
            print(f"survived in {name}, line {text}")
    num_tried = sum(outcome != SKIPPED for _, _, outcome in results)
    num_left = sum(map(len, survivors.values()))
    share = 1 - num_left / max(num_tried, 1)
    print(f"{num_tried - num_left} of {num_tried} noticed ({share:.1%}), {len(results)} in all, {seconds:.0f} s")
    if path is not None:
        path.write_text(json.dumps(survivors, indent=1) + "\n")
    return int(share < 0.9)


if __name__ == "__main__":
    raise SystemExit(main())
