"""Calls that may hang: whoever asks waits for a while at most, and no thread is added at each asking."""

from __future__ import annotations

import threading
import time

import pytest

from cb_backend.support.bounded_call import BoundedCall
from tests.waiting import eventually


def test_gives_what_the_call_gives_or_raises() -> None:
    bounded = BoundedCall[int]()
    assert [bounded(lambda value=value: value, 30.0) for value in (1, 2)] == [1, 2]  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 30.0)
    assert bounded(lambda: 3, 30.0) == 3
    assert not bounded.is_late


def test_a_call_that_hangs_is_asked_once_and_waited_for_once() -> None:
    answers, asked = threading.Event(), []

    def hang() -> str:
        asked.append(1)
        assert answers.wait(60)
        return "late"

    bounded = BoundedCall[str]()
    for _ in range(4):
        with pytest.raises(TimeoutError):
            bounded(hang, 0.02)
        assert bounded.is_late
    assert len(asked) == 1
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        bounded(hang, 3600.0)  # it is known to hang
    assert time.monotonic() - start < 600
    answers.set()
    found: list[str] = []

    def is_back() -> bool:
        try:
            found.append(bounded(lambda: "another call", 0.0))
        except TimeoutError:
            return False
        return True

    eventually(is_back, "the first call")
    assert found == ["late"]
    assert not bounded.is_late
    assert bounded(lambda: "another call", 30.0) == "another call"


def test_what_a_late_call_raises_reaches_who_asks_then() -> None:
    fails = threading.Event()

    def fail() -> str:
        assert fails.wait(60)
        raise OSError("gone")

    bounded = BoundedCall[str]()
    with pytest.raises(TimeoutError):
        bounded(fail, 0.0)
    fails.set()
    told: list[str] = []

    def is_told() -> bool:
        try:
            bounded(fail, 0.0)
        except TimeoutError:
            return False
        except OSError as error:
            told.append(str(error))
        return bool(told)

    eventually(is_told, "the error")
    assert told == ["gone"]
