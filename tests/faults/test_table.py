"""The table of a run of faults: every figure is there, what is late or lost is not ok."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.faults.checker import Verdict
from tests.faults.injections import FAULTS
from tests.faults.run import ALL, COLUMNS, judge, late_recovery, table

PAUSE = next(fault for fault in FAULTS if fault.name == "F4")


def result_of(verdicts: list[Verdict], name: str = "F4") -> dict[str, Any]:
    result = {"times": len(verdicts), "what": ALL[name].what, "asked s": ALL[name].recovery_s, "took s": 7}
    result |= judge(verdicts)
    result["problems"] += late_recovery(ALL[name], result)
    return result


def verdict(recovery_s: list[float], **counts: int) -> Verdict:
    return Verdict(counts=Counter(counts), recovery_s=recovery_s)


def test_a_line_holds_the_figures_of_all_servers_of_a_fault() -> None:
    result = result_of([verdict([0.5, 3.0], requests=10, good=9, errors=1), verdict([1.0], requests=5, good=5)])
    head, line = table({"F4": result})
    assert list(COLUMNS) == [name for name in COLUMNS if name in head]
    assert line.startswith("F4   SIGSTOP of the engine")
    figures = line.rpartition("0.5 s")[2].split()
    assert figures == ["2", "15", "14", "1", "0", "0", "0", "0/0", "-", "1.0", "3.0", "5.0", "7", "ok"]


def test_what_is_late_or_lost_is_not_ok() -> None:
    late = result_of([verdict([5.5], requests=1)])
    assert late["problems"] == ["recovered only after 5.5 s, asked are 5 s"]
    lost = result_of([Verdict(["a-1: has no end"], Counter(lost=1))])
    for result in (late, lost):
        assert list(table({"F4": result}))[1].endswith("NOT ok")


def test_all_faults_are_there_in_order() -> None:
    lines = list(table({name: result_of([verdict([1.0])], name) for name in ALL}))
    assert [line.split()[0] for line in lines[1:]] == [f"F{number}" for number in range(1, 21)]
