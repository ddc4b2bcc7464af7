"""Judges histories afterwards, from what clients saw alone. It knows no server and asks nobody.

    python -m tests.faults.checker FOLDER     # again, of a folder that tests.faults.run --keep has left

A request must have exactly one end, nothing after it, and the text of its plan: all of it at a good end, a beginning of
it before an error or a cancellation. Errors may come only while a fault lasts and until the server has recovered from
it, and only with the codes that the fault allows.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.faults.history import Event, Item, by_request, read_history, read_plan

FINISH_REASONS = ("stop", "length")
_INTERNALS = re.compile(r"Traceback|\.py\b|/(home|tmp|work|usr|opt|dev)/|0x[0-9a-f]{6,}")


@dataclass(frozen=True, slots=True)
class Window:
    """One injection: from when until when, and what may be seen of it."""

    begin: float
    end: float
    codes: frozenset[str] = frozenset()  # of errors that may come
    recovery_limit_s: float = 30.0
    may_give_up: bool = False  # clients may run into their own deadline
    is_end: bool = False  # of the server: there is nothing to recover


@dataclass
class Verdict:
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # requests, good, cancelled, ..., and errors by code
    recovery_s: list[float] = field(default_factory=list)  # of each window, from the fault's end
    latest_error_s: list[float] = field(default_factory=list)  # of requests open at a fault's begin, from there

    @property
    def num_lost(self) -> int:
        return self.counts["lost"]

    @property
    def num_wrong(self) -> int:
        return self.counts["wrong"]

    @property
    def canary_error_share(self) -> float:
        return self.counts["canary errors"] / max(self.counts["canaries"], 1)


def check(
    events: list[Event], plan: list[Item], windows: list[Window], killed_clients: frozenset[str] = frozenset()
) -> Verdict:
    """`killed_clients`: names of clients whose requests have no end in their histories, because they were killed."""
    verdict = Verdict()
    canaries: list[tuple[float, float, bool]] = []  # sent, ended, ended well
    for request, own in by_request(events):
        problem = _check_one(own, plan, windows, verdict, is_killed=request.rpartition("-")[0] in killed_clients)
        if problem is not None:
            verdict.problems.append(f"{request}: {problem}")
        if own[0].role == "canary":
            is_good = any(event.kind == "final" for event in own)
            canaries.append((own[0].time, own[-1].time, is_good))
            verdict.counts["canaries"] += 1
            verdict.counts["canary errors"] += not is_good
    begins = [window.begin for window in windows]
    for window in windows:
        until = min((begin for begin in begins if begin > window.begin), default=math.inf)
        _check_recovery(window, until, canaries, verdict)
    return verdict


def _check_one(
    own: list[Event], plan: list[Item], windows: list[Window], verdict: Verdict, is_killed: bool
) -> str | None:
    counts, send = verdict.counts, own[0]
    counts["requests"] += 1
    if send.kind != "send" or any(event.kind == "send" for event in own[1:]):
        counts["wrong"] += 1
        return "does not begin with its one send"
    ends = [event for event in own if event.kind in ("final", "error")]
    text = "".join(event.text for event in own if event.kind in ("delta", "final"))
    expected = plan[send.item].expected
    if len(ends) > 1:
        counts["wrong"] += 1
        return f"{len(ends)} ends"
    if ends and any(event.kind == "delta" for event in own[own.index(ends[0]) :]):
        counts["wrong"] += 1
        return "text after its end"
    if any(event.kind == "cancel" for event in own):
        counts["cancelled"] += 1
        return _check_beginning(text, expected, counts)
    if not ends:
        return _check_endless(own, windows, counts, is_killed) or _check_beginning(text, expected, counts)
    if send.role == "bad":
        counts["bad"] += 1
        is_refused = ends[0].kind == "error" and not text
        is_clear = ends[0].code == "INVALID_ARGUMENT" or bool(_find_windows(own, windows))
        if not (is_refused and is_clear):
            counts["wrong"] += 1
            return f"a bad request was answered with {ends[0]}"
        return _check_words(ends[0], counts)
    if ends[0].kind == "final" and send.role == "long":
        counts["good"] += 1
        return _check_beginning(text, expected, counts)
    if ends[0].kind == "final":
        if text != expected or ends[0].code not in FINISH_REASONS:
            counts["wrong"] += 1
            return f"got {text!r} ({ends[0].code!r}), should be {expected!r}"
        counts["good"] += 1
        return None
    return _check_beginning(text, expected, counts) or _check_error(own, ends[0], windows, verdict)


def _check_beginning(text: str, expected: str, counts: Counter[str]) -> str | None:
    """Of a request that was cut off; it may have been longer than its plan."""
    length = min(len(text), len(expected.rstrip("\ufffd")))  # a character that the plan cuts off may go on
    if text[:length] != expected[:length]:
        counts["wrong"] += 1
        return f"got {text!r}, which does not begin as {expected!r} does"
    return None


def _check_endless(own: list[Event], windows: list[Window], counts: Counter[str], is_killed: bool) -> str | None:
    if is_killed:
        counts["of killed clients"] += 1
        return None
    if own[-1].kind == "give_up" and any(window.may_give_up for window in _find_windows(own, windows)):
        counts["gave up"] += 1
        return None
    counts["lost"] += 1
    return "has no end" + (f", its client gave up: {_patience(own)}" if own[-1].kind == "give_up" else "")


def _patience(own: list[Event]) -> str:
    """What a client had when it gave up: whether it waited for a start, in the middle, or was just slowly served."""
    waited = own[-1].time - own[0].time
    texts = [event.time for event in own if event.kind == "delta"]
    if not texts:
        return f"nothing came in {waited:.0f} s"
    silences = [after - before for before, after in zip(texts, [*texts[1:], own[-1].time], strict=True)]
    return (
        f"{len(texts)} pieces of text in {waited:.0f} s, the first after {texts[0] - own[0].time:.1f} s, the longest"
        f" silence {max(silences):.1f} s"
    )


def _check_error(own: list[Event], end: Event, windows: list[Window], verdict: Verdict) -> str | None:
    counts = verdict.counts
    counts[end.code] += 1
    counts["errors"] += 1
    found = _find_windows(own, windows)
    if not found:
        counts["unexpected"] += 1
        return f"error outside of a fault: {end.code}: {end.text}"
    if not any(end.code in window.codes for window in found):
        counts["unexpected"] += 1
        return f"an error that the fault does not explain: {end.code}: {end.text}"
    if own[0].time < found[-1].begin:
        verdict.latest_error_s.append(end.time - found[-1].begin)
    return _check_words(end, counts)


def _check_words(end: Event, counts: Counter[str]) -> str | None:
    if _INTERNALS.search(end.text):
        counts["unexpected"] += 1
        return f"an error shows internals: {end.text}"
    return None


def _find_windows(own: list[Event], windows: list[Window]) -> list[Window]:
    """The faults during which, or during the recovery from which, a request was open."""
    begin, end = own[0].time, own[-1].time
    return [w for w in windows if begin <= w.end + w.recovery_limit_s and end >= w.begin]


def _check_recovery(window: Window, until: float, canaries: list[tuple[float, float, bool]], verdict: Verdict) -> None:
    """From the fault's end to the end of the first canary from which on, for the time of recovery, all went well.

    What ends after `until`, when the next fault began, is not this one's.
    """
    if window.is_end:
        return
    limit = window.end + window.recovery_limit_s
    later = [canary for canary in canaries if window.begin <= canary[0] <= limit and canary[1] <= until]
    first_good: float | None = None
    for _, ended, is_good in sorted(later):
        first_good = (first_good if first_good is not None else ended) if is_good else None
    if first_good is None or first_good > limit:
        verdict.counts["not recovered"] += 1
        verdict.problems.append(f"no canary went well within {window.recovery_limit_s:g} s of a fault's end")
        return
    verdict.recovery_s.append(max(first_good - window.end, 0.0))


def write_windows(folder: Path, windows: list[Window], killed_clients: set[str]) -> None:
    """What the histories of a folder must be judged by."""
    rows = [{**asdict(window), "codes": sorted(window.codes)} for window in windows]
    (folder / "windows.json").write_text(json.dumps({"windows": rows, "killed_clients": sorted(killed_clients)}))


def check_folder(folder: Path) -> Verdict:
    """Judge a folder: plan.json, windows.json and every history-*.jsonl."""
    known = json.loads((folder / "windows.json").read_text())
    windows = [Window(**{**row, "codes": frozenset(row["codes"])}) for row in known["windows"]]
    events = [event for path in sorted(folder.glob("history-*.jsonl")) for event in read_history(path)]
    return check(events, read_plan(folder / "plan.json"), windows, frozenset(known["killed_clients"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.checker", description="Judges again what tests.faults.run --keep has left"
    )
    parser.add_argument("folder", type=Path, help="with plan.json, windows.json and the histories of the clients")
    verdict = check_folder(parser.parse_args().folder)
    print(dict(verdict.counts), "recovery", [round(seconds, 2) for seconds in verdict.recovery_s])
    print("\n".join(verdict.problems) or "clean")
    sys.exit(int(bool(verdict.problems)))
