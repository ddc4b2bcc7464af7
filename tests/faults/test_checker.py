"""The checker must accept a right history and reject every kind of wrong one. pytest tests/faults/test_checker.py"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.checker import Verdict, Window, check
from tests.faults.history import Event, HistoryReader, HistoryWriter, Item, read_history
from tests.faults.traffic import code_of

PLAN = [Item("canary", 3, "abc"), Item("long", 4, "wxyz")]
ERROR = "the engine stopped and is being started again; send the request again"
WINDOW = Window(10.0, 11.0, frozenset({"UNAVAILABLE"}), recovery_limit_s=5.0)

Corruption = Callable[[list[Event]], list[Event]]


def request(name: str, begin: float, role: str = "load", item: int = 1, good: bool = True) -> list[Event]:
    """A request that takes a second: three pieces of text, or two and an error."""
    text = PLAN[item].expected
    end = Event(begin + 1, name, "final", text[2:], "length") if good else Event(begin + 1, name, "error", ERROR)
    return [
        Event(begin, name, "send", role=role, item=item),
        Event(begin + 0.2, name, "delta", text[:1]),
        Event(begin + 0.4, name, "delta", text[1:2]),
        end if good else replace(end, code="UNAVAILABLE"),
        *([Event(begin + 1.01, name, "closed")] if good else []),
    ]


def right_history() -> list[Event]:
    """A fault at 10: the requests of that second end with an error; canaries go well from 12 on."""
    events = [e for t in range(20) for e in request(f"a-{t}", float(t), good=t != 10)]
    events += [e for t in range(20) for e in request(f"c-{t}", t + 0.5, "canary", 0, good=t not in (10, 11))]
    return sorted(events, key=lambda event: event.time)


def judge(events: list[Event], windows: list[Window] | None = None) -> Verdict:
    return check(events, PLAN, [WINDOW] if windows is None else windows)


def test_a_right_history_is_accepted() -> None:
    verdict = judge(right_history())
    assert verdict.problems == []
    assert verdict.counts["requests"] == 40
    assert verdict.counts["good"] == 37
    assert verdict.counts["UNAVAILABLE"] == 3
    assert verdict.recovery_s == [13.51 - 11.0], "the first canary that went well was sent at 12.5"
    assert verdict.latest_error_s == []
    assert verdict.canary_error_share == 0.1


def drop(name: str, kind: str) -> Corruption:
    return lambda events: [e for e in events if (e.request, e.kind) != (name, kind)]


def change(name: str, which: str, **values: object) -> Corruption:
    return lambda events: [
        replace(e, **values) if (e.request, e.kind) == (name, which) else e  # type: ignore[arg-type]
        for e in events
    ]


def add(name: str, kind: str, time: float, **values: str) -> Corruption:
    return lambda events: sorted([*events, Event(time, name, kind, **values)], key=lambda e: e.time)  # type: ignore[arg-type]


CORRUPTIONS = [
    pytest.param(lambda e: drop("a-3", "closed")(drop("a-3", "final")(e)), "has no end", "lost", id="no end"),
    pytest.param(lambda e: add("a-3", "give_up", 70.0)(drop("a-3", "final")(e)), "gave up", "lost", id="gave up"),
    pytest.param(add("a-3", "final", 4.5), "2 ends", "wrong", id="two finals"),
    pytest.param(add("a-3", "error", 4.5, text=ERROR), "2 ends", "wrong", id="an error after the final"),
    pytest.param(add("a-3", "delta", 4.5, text="w"), "text after its end", "wrong", id="text after the end"),
    pytest.param(drop("a-3", "delta"), "should be", "wrong", id="missing text"),
    pytest.param(change("a-3", "final", text="Yz"), "should be", "wrong", id="another token"),
    pytest.param(change("a-3", "final", code=""), "should be", "wrong", id="no finish reason"),
    pytest.param(change("a-10", "delta", text="Q"), "does not begin as", "wrong", id="wrong before an error"),
    pytest.param(change("a-10", "error", code="INTERNAL"), "does not explain", "unexpected", id="wrong code"),
    pytest.param(
        change("a-10", "error", text="File engine.py: Traceback"), "internals", "unexpected", id="a trace in an error"
    ),
    pytest.param(change("a-3", "final", kind="error", code="UNAVAILABLE"), "outside", "unexpected", id="no fault"),
    pytest.param(drop("a-3", "send"), "one send", "wrong", id="no send"),
]  # fmt: skip


@pytest.mark.parametrize(("corrupt", "words", "count"), CORRUPTIONS)
def test_a_wrong_history_is_rejected(corrupt: Corruption, words: str, count: str) -> None:
    verdict = judge(corrupt(right_history()))
    assert any(words in problem for problem in verdict.problems), verdict.problems
    assert verdict.counts[count] == 1


def test_no_recovery_is_found_out() -> None:
    slow = [e for e in right_history() if not (e.request.startswith("c-") and e.time > 11.5)]
    verdict = judge(slow)
    assert any("no canary went well" in problem for problem in verdict.problems)


def test_what_the_next_fault_breaks_is_not_the_first_ones() -> None:
    """Two faults within the time that one may take to recover from: each has the canaries up to the next."""
    first, second = replace(WINDOW, recovery_limit_s=30.0), replace(WINDOW, begin=20.0, end=21.0, recovery_limit_s=30.0)
    events = [e for t in range(30) for e in request(f"c-{t}", t + 0.5, "canary", 0, good=t not in (10, 11, 19, 20, 21))]
    events += [e for t in range(30) for e in request(f"a-{t}", float(t))]
    verdict = check(sorted(events, key=lambda event: event.time), PLAN, [second, first])
    assert verdict.problems == []
    assert sorted(verdict.recovery_s) == [pytest.approx(13.51 - 11), pytest.approx(23.51 - 21)]
    never = [e for e in events if not (e.request.startswith("c-") and 12 < e.time < 20.5)]
    verdict = check(sorted(never, key=lambda event: event.time), PLAN, [first, second])
    assert len([problem for problem in verdict.problems if "no canary went well" in problem]) == 1


def test_requests_of_killed_and_cancelling_clients_need_no_end() -> None:
    cut = request("dead-1", 3.0)[:3]
    assert check(cut, PLAN, [], frozenset({"dead"})).problems == []
    assert check(cut, PLAN, []).num_lost == 1
    wrong = [*cut[:2], replace(cut[2], text="Q")]
    assert check(wrong, PLAN, [], frozenset({"dead"})).num_wrong == 1
    cancelled = [*cut, Event(4.0, "dead-1", "cancel")]
    assert check(cancelled, PLAN, []).problems == []
    assert check([*wrong, Event(4.0, "dead-1", "cancel")], PLAN, []).num_wrong == 1


def test_bad_requests_must_be_refused() -> None:
    def bad(end: Event) -> Verdict:
        return check([Event(1.0, "b-1", "send", role="bad", item=0), end], PLAN, [])

    assert bad(Event(1.1, "b-1", "error", "max_tokens is 0", "INVALID_ARGUMENT")).problems == []
    assert bad(Event(1.1, "b-1", "final", "abc", "length")).num_wrong == 1
    assert bad(Event(1.1, "b-1", "error", "oh", "INTERNAL")).num_wrong == 1


def test_histories_are_read_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    reader = HistoryReader(path)
    assert reader.read() == []
    writer = HistoryWriter(path)
    writer.write("a-1", "send", role="load", item=3)
    (event,) = reader.read()
    assert (event.request, event.kind, event.role, event.item) == ("a-1", "send", "load", 3)
    writer.write("a-1", "delta", text="né")
    with path.open("a") as file:
        file.write('{"time": 1.0, "requ')  # its client was killed here
    assert [event.text for event in reader.read()] == ["né"]
    assert len(read_history(path)) == 2
    writer.close()


def test_errors_are_told_apart_by_their_words() -> None:
    assert code_of(ERROR) == "UNAVAILABLE"
    assert code_of("the engine could not compute this request; the server's log says why") == "INTERNAL"
    assert code_of("max_tokens must be at least 1, got 0") == "INVALID_ARGUMENT"


def test_a_client_that_gave_up_says_what_it_had() -> None:
    """Never started, stopped in the middle, or served slowly: three causes that must be told apart."""
    send = Event(0.0, "a-1", "send", role="load", item=1)
    give_up = Event(60.0, "a-1", "give_up", code="CONNECTION")
    assert "nothing came in 60 s" in check([send, give_up], PLAN, []).problems[0]
    texts = [Event(2.0, "a-1", "delta", "w"), Event(30.0, "a-1", "delta", "x")]
    (problem,) = check([send, *texts, give_up], PLAN, []).problems
    assert "2 pieces of text in 60 s, the first after 2.0 s, the longest silence 30.0 s" in problem


def test_the_checker_says_how_it_is_used() -> None:
    told = subprocess.run([sys.executable, "-m", "tests.faults.checker", "--help"], capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (0, "")
    assert "folder" in told.stdout
