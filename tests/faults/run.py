"""Injects faults into a real server under load and judges what its clients saw.

    python -m tests.faults.run --fault F5 --times 20
    python -m tests.faults.run --times 5 --json faults.json       # all of them

While it runs it prints what each fault gave, at the end one table. Exit code 0: nothing lost, nothing wrong, every
recovery in the time that is asked of a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import adapter_injections, server_injections
from tests.faults.checker import Verdict
from tests.faults.history import Item
from tests.faults.injections import FAULTS, Fault
from tests.faults.world import World, make_plan, world
from tests.server.tiny_checkpoint import Reference, write_tiny_checkpoint

ALL = {fault.name: fault for fault in (*FAULTS, *server_injections.FAULTS, *adapter_injections.FAULTS)}
PAUSE_S = 1.0  # between injections, on top of the recovery


@dataclass(frozen=True, slots=True)
class Setting:
    """What all faults of a run share."""

    checkpoint: Path
    plan: list[Item]
    seed: int = 0
    restart_limit_s: float = 30.0


def run_fault(fault: Fault, times: int, setting: Setting, folder: Path) -> list[Verdict]:
    """One verdict a server: one for all injections, unless the server does not survive them."""
    folder.mkdir(parents=True)
    groups = [[number] for number in range(times)] if fault.is_last else [list(range(times))]
    return [_run_safely(fault, numbers, setting, folder / str(numbers[0])) for numbers in groups]


def _run_safely(fault: Fault, numbers: list[int], setting: Setting, folder: Path) -> Verdict:
    """A server that cannot be started or ended is a finding, and no reason to leave the other faults out."""
    try:
        return _run(fault, numbers, setting, folder)
    except Exception as error:
        traceback.print_exc()
        return Verdict([f"{type(error).__name__}: {error}"])


def _run(fault: Fault, numbers: list[int], setting: Setting, folder: Path) -> Verdict:
    server = dict(fault.server)
    if fault.prepare is not None:
        server |= fault.prepare(folder.parent)
    seed = setting.seed + numbers[0]
    with world(setting.checkpoint, setting.plan, folder, seed, fault.load, **server) as made:
        made.restart_limit_s = setting.restart_limit_s
        for number in numbers:
            try:
                fault.inject(made, number)
                if not fault.is_last:
                    made.wait_for_canary(made.windows[-1].end)
                    time.sleep(PAUSE_S)
            except TimeoutError as error:
                made.notes.append(f"injection {number}: {error}")
        if not fault.is_last:
            made.load.stop()
            _check_idle(made)
        return made.judge()


def _check_idle(made: World) -> None:
    try:
        if made.server.process.has_metrics:
            made.server.wait_idle()
    except AssertionError as error:
        made.notes.append(f"not idle at the end: {error}")


def judge(verdicts: list[Verdict]) -> dict[str, Any]:
    """The figures of all servers of a fault together."""
    counts: Counter[str] = sum((verdict.counts for verdict in verdicts), Counter())
    recovery = sorted(r for verdict in verdicts for r in verdict.recovery_s)
    told = [t for verdict in verdicts for t in verdict.latest_error_s]
    return {
        "requests": counts["requests"],
        "good": counts["good"],
        "errors": counts["errors"],
        "gave up": counts["gave up"],
        "lost": counts["lost"],
        "wrong": counts["wrong"],
        "unexpected": counts["unexpected"] + counts["not recovered"],
        "server aborts": counts["server aborts"],
        "canary errors": f"{counts['canary errors']}/{counts['canaries']}",
        "told within s": round(max(told), 2) if told else None,
        "recovery p50 s": round(recovery[len(recovery) // 2], 2) if recovery else None,
        "recovery max s": round(recovery[-1], 2) if recovery else None,
        "problems": [problem for verdict in verdicts for problem in verdict.problems],
    }


COLUMNS = {  # of the table: the figure, and how wide
    "times": 6, "requests": 9, "good": 7, "errors": 7, "lost": 5, "wrong": 6, "unexpected": 11, "canary errors": 14,
    "told within s": 14, "recovery p50 s": 15, "recovery max s": 15, "asked s": 8, "took s": 7,
}  # fmt: skip


def table(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Lines to print: one a fault, in the order of their numbers."""
    yield f"{'':5}{'fault':48}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items()) + "   verdict"
    for name in sorted(results, key=lambda name: int(name[1:])):
        result = results[name]
        cells = ("-" if result[column] is None else str(result[column]) for column in COLUMNS)
        figures = "".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True))
        yield f"{name:5}{result['what'][:47]:48}{figures}   {'ok' if not result['problems'] else 'NOT ok'}"


def late_recovery(fault: Fault, result: dict[str, Any]) -> list[str]:
    """What is wrong with the time to recovery, on a machine that has nothing else to do."""
    took, asked = result["recovery max s"], fault.recovery_s
    return [f"recovered only after {took} s, asked are {asked:g} s"] if took is not None and took > asked else []


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__)
    parser.add_argument("--fault", nargs="+", choices=list(ALL), default=list(ALL))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restart-limit", type=float, default=30.0, help="seconds in which an engine must be back")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--keep", type=Path, help="keep histories in this folder")
    options = parser.parse_args(arguments)
    if options.times < 1:
        parser.error(f"--times is {options.times}; it must be at least 1")
    results = {}
    with tempfile.TemporaryDirectory(prefix="cb-faults-", dir="/tmp") as temporary:
        base = options.keep or Path(temporary)
        checkpoint = write_tiny_checkpoint(Path(temporary) / "checkpoint")
        setting = Setting(checkpoint, make_plan(Reference(checkpoint)), options.seed, options.restart_limit)
        for name in options.fault:
            begin = time.monotonic()
            verdicts = run_fault(ALL[name], options.times, setting, base / name)
            result = results[name] = {"times": options.times, "what": ALL[name].what, **judge(verdicts)}
            result |= {"asked s": ALL[name].recovery_s, "took s": round(time.monotonic() - begin)}
            result["problems"] += late_recovery(ALL[name], result)
            figures = "  ".join(f"{key} {value}" for key, value in result.items() if key not in ("what", "problems"))
            print(f"{name}  {ALL[name].what}\n     {figures}", flush=True)
            for problem in result["problems"][:10]:
                print(f"     ! {problem[:400]}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    print("\n".join(table(results)))
    is_clean = not any(result["problems"] for result in results.values())
    print("clean" if is_clean else "NOT clean")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
