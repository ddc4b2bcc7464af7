"""Changes the code under test in small ways, one at a time, and counts how many of the changes the tests notice.

python -m tests.mutation.run [--modules scheduler block_pool ...] [--sample N] [--jobs J] [--journal FILE] [--json FILE]

Every mutant is a forked process that imports the changed module in place of the right one and runs the tests named for
it (`targets`) until the first failure. A mutant that hangs is noticed. Survivors are printed. Those that change nothing
that can be seen are listed in `equivalent.txt` with reasons, and are not tried. With a journal a run that was stopped
goes on where it was, and one after changes tries again only mutants of changed modules or under changed tests. Needs
the repository, numpy, msgspec, pyzmq, tokenizers, pytest and hypothesis; no torch.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutation.journal import Journal
from tests.mutation.mutate import Mutant, mutants, mutated
from tests.mutation.targets import ROOT, TARGETS, fingerprints, source_of

EQUIVALENT = Path(__file__).with_name("equivalent.txt")
LONGEST_CPU_S = 60  # of one mutant, on its own clock: how busy the machine is does not matter
LONGEST_S = 1800  # for one that hangs without computing
PROGRESS_S = 20.0
SURVIVED, NOTICED, HUNG, SKIPPED = "survived", "noticed", "hung", "skipped"


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with one change in it."""

    def __init__(self, module: str, index: int) -> None:
        self.module, self.index = module, index
        self.path = source_of(module)

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module) -> None:
        exec(compile(mutated(self.path.read_text(), self.index), str(self.path), "exec"), module.__dict__)


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


def try_out(name: str, mutant: Mutant | None, deadline: float = float("inf")) -> tuple[str, Mutant | None, str]:
    """Run the tests of a target with this change (None: without any) in a process of its own: SURVIVED, ..."""
    if time.time() > deadline:
        return name, mutant, SKIPPED
    pid = os.fork()
    if pid == 0:
        _run_tests(*TARGETS[name], mutant)
    status = os.waitpid(pid, 0)[1]
    return name, mutant, SURVIVED if status == 0 else HUNG if os.WIFSIGNALED(status) else NOTICED


def _run_tests(module: str, tests: Sequence[str], mutant: Mutant | None) -> None:
    """Never returns."""
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_CPU_S, LONGEST_CPU_S))  # ends the process: it is noticed
    signal.alarm(LONGEST_S)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if mutant is not None:
        sys.meta_path.insert(0, _Changed(module, mutant.index))
    code = 1
    try:
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *(str(ROOT / test) for test in tests)])
    finally:
        os._exit(int(code))


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
    began, work, results = time.perf_counter(), [], []
    deadline = time.time() + options.limit
    journal = Journal(options.journal)
    prints = {name: fingerprints(name) for name in options.modules}
    for name in options.modules:
        found = mutants_to_try(name)
        if options.sample and len(found) > options.sample:
            found = sorted(random.Random(0).sample(found, options.sample), key=lambda mutant: mutant.index)
        for mutant in found:
            known = journal.outcome(name, mutant, *prints[name], keep=NOTICED if options.keep_noticed else "")
            if known is None:
                work.append((name, mutant, deadline))
            else:
                results.append((name, mutant, known))
    num_all = len(results) + len(work)
    random.Random(1).shuffle(work)  # so that a run that is cut short has seen something of each
    print(f"{len(results)} mutants known, {len(work)} to try", flush=True)
    # Workers have one thread, so that they can fork safely.
    with multiprocessing.get_context("spawn").Pool(options.jobs, _import_the_heavy) as pool:
        whole = [(name, None, float("inf")) for name in dict.fromkeys(name for name, *_ in work)]
        for name, _, outcome in pool.imap_unordered(_try_out, whole):
            if outcome != SURVIVED:
                print(f"the tests of {name} fail without any change ({outcome}); mend them first")
                return 2
        told = time.perf_counter()
        for name, mutant, outcome in pool.imap_unordered(_try_out, work):
            results.append((name, mutant, outcome))
            if outcome != SKIPPED:
                journal.note(name, mutant, *prints[name], outcome)
            if outcome == SURVIVED:
                print(f"survived in {name}, line {mutant.line}: {mutant.what}", flush=True)
            if time.perf_counter() - told > PROGRESS_S:
                told = time.perf_counter()
                print(f"{len(results)} of {num_all}", flush=True)
    return _show(results, time.perf_counter() - began, options.json)


def _try_out(work: tuple[str, Mutant | None, float]) -> tuple[str, Mutant | None, str]:
    return try_out(*work)


def _import_the_heavy() -> None:
    """What the forked processes then need not import."""
    import hypothesis  # noqa: F401
    import numpy as np  # noqa: F401
    import pytest  # noqa: F401


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
