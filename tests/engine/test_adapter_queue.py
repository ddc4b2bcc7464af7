"""Adapters that wait for others to be read, or for a disk that hangs: pytest tests/engine/test_adapter_queue.py"""

from __future__ import annotations

import threading
from functools import partial

from cb_backend.contracts.errors import UnavailableError
from cb_backend.engine import adapters
from cb_backend.engine.adapter_wait import AdapterWait
from cb_backend.engine.adapters import READ_TIMEOUT_S, WITHOUT_ROOM, AdapterStore
from tests.engine.adapter_reader import Packed, Reader, refusal, source
from tests.waiting import eventually


def test_who_waits_too_long_is_told_where() -> None:
    reader = Reader({"/adapters/a": b"a"})
    reader.gate.clear()
    store = AdapterStore(reader, 1)
    keys: list[bytes] = []
    wait = AdapterWait(store, source("a"), keys.append, 10.0)
    store.find(source("a"), 10.0)
    eventually(lambda: store.turn_of(source("a")) is None, "the reader")
    assert store.find(source("b"), 10.0) is None
    assert store.turn_of(source("b")) == WITHOUT_ROOM, "what is being read has the only room"
    assert wait(10.0) is False
    assert wait(10.0 + READ_TIMEOUT_S) is False
    late = wait(10.1 + READ_TIMEOUT_S)
    assert isinstance(late, UnavailableError)
    assert "/adapters/a" in str(late)
    assert "30 s" in str(late)
    assert keys == []
    reader.gate.set()
    store.close()


def test_who_waits_behind_others_is_not_late_while_they_are_read() -> None:
    """One read in 20 seconds, two at a time: the last is there after two minutes, and nobody was late."""
    names = "abcdef"
    reader = Reader({f"/adapters/{name}": name.encode() for name in names})
    may_read = threading.Semaphore(0)
    reader.gate.wait = lambda timeout=None: may_read.acquire()  # type: ignore[method-assign]
    store = AdapterStore(reader, len(names))
    keys: list[bytes] = []
    waits = {name: AdapterWait(store, source(name), keys.append, 0.0) for name in names}
    open_names, now = set(names), 0.0
    for num_read in range(1, len(names) + 1):
        for name in sorted(open_names):
            assert waits[name](now) is False
        now += 20.0
        may_read.release()
        eventually(partial(lambda done: store.num_reads == done, num_read), "a read")

        def take(now: float = now, num_left: int = len(names) - num_read) -> bool:
            open_names.difference_update(name for name in sorted(open_names) if waits[name](now) is True)
            return len(open_names) == num_left

        eventually(take, "what was read")
    assert sorted(keys) == [name.encode() for name in names]
    store.close()


def test_who_stands_behind_files_that_hang_is_told() -> None:
    reader = Reader({f"/adapters/{name}": name.encode() for name in "abc"})
    reader.gate.clear()
    store = AdapterStore(reader, 3)
    wait = None
    for name in "abc":
        wait = AdapterWait(store, source(name), lambda key: None, 0.0)
        assert wait(0.0) is False
    assert wait is not None
    assert isinstance(wait(READ_TIMEOUT_S + 0.1), UnavailableError)
    reader.gate.set()
    store.close()


class HungReader(Reader):
    """Some folders are on a disk that does not answer until it is told to."""

    def __init__(self, content: dict[str, bytes], hung: set[str]) -> None:
        super().__init__(content)
        self.hung = hung
        self.asked: list[str] = []
        self.answers = threading.Event()

    def read(self, path: str) -> Packed:
        self.asked.append(path)
        if path in self.hung:
            assert self.answers.wait(60)
        return super().read(path)


def test_a_disk_that_hangs_holds_up_no_other_adapter() -> None:
    """Not even with as many of its files asked for as there are threads; nor do threads pile up at it."""
    names = [f"hung{index}" for index in range(adapters.NUM_THREADS)]
    content = {f"/adapters/{name}": name.encode() for name in (*names, "doll")}
    reader = HungReader(content, {f"/adapters/{name}" for name in names})
    store = AdapterStore(reader, 8)
    waits = [AdapterWait(store, source(name), lambda key: None, 0.0) for name in names]
    assert [wait(0.0) for wait in waits] == [False] * len(names)
    eventually(lambda: len(reader.asked) == len(names), "both threads hang")
    keys: list[bytes] = []
    doll = AdapterWait(store, source("doll"), keys.append, 0.0)
    assert [wait(1.0) for wait in (*waits, doll)] == [False] * (len(names) + 1)
    for wait in waits:
        told = wait(READ_TIMEOUT_S + 1.1)
        assert isinstance(told, UnavailableError)
        assert "was not read from /adapters/hung" in str(told)
    eventually(lambda: doll(READ_TIMEOUT_S + 1.2) is True, "the other adapter, whose time begins when it is read")
    assert keys == [b"doll"]
    for _ in range(3):  # who asks again is told at once
        assert isinstance(refusal(store, source("hung0"), READ_TIMEOUT_S + 2.0), UnavailableError)
    assert reader.asked.count("/adapters/hung0") == 1
    reader.answers.set()

    def is_found() -> bool:
        try:
            return store.find(source("hung0"), READ_TIMEOUT_S + 3.0) == b"hung0"
        except UnavailableError:
            return False

    eventually(is_found, "it answers again")
    assert reader.asked.count("/adapters/hung0") == 1, "what was read meanwhile counts"
    store.close()


def test_what_waits_behind_others_and_is_given_up_is_read_by_nobody() -> None:
    reader = HungReader({"/adapters/hung0": b"0", "/adapters/hung1": b"1"}, {"/adapters/hung0", "/adapters/hung1"})
    store = AdapterStore(reader, 8)
    for name in ("hung0", "hung1", "doll"):
        assert store.find(source(name), 0.0) is None
    eventually(lambda: len(reader.asked) == 2, "both threads hang")
    store.give_up(source("doll"))
    store.give_up(source("hung0"))
    store.give_up(source("nobody asked for"))
    reader.answers.set()
    eventually(lambda: store.num_reads == 2, "both end")
    assert "/adapters/doll" not in reader.asked
    store.close()


def test_a_read_that_hangs_and_that_nobody_waits_for_keeps_no_room() -> None:
    """Its client went away before it could be told that it was late."""
    reader = HungReader({"/adapters/hung0": b"0", "/adapters/doll": b"doll"}, {"/adapters/hung0"})
    store = AdapterStore(reader, 1)
    assert store.find(source("hung0"), 0.0) is None
    eventually(lambda: len(reader.asked) == 1, "it hangs")
    keys: list[bytes] = []
    doll = AdapterWait(store, source("doll"), keys.append, 1.0)
    for now in (1.0, READ_TIMEOUT_S):
        assert doll(now) is False
        assert store.turn_of(source("doll")) == WITHOUT_ROOM
        store.tidy(set, now)

    reader.gate.clear()
    store.tidy(set, READ_TIMEOUT_S + 0.1)
    doll(READ_TIMEOUT_S + 0.1)
    assert store.turn_of(source("doll")) != WITHOUT_ROOM, "it has the room of what hangs"
    reader.gate.set()
    eventually(lambda: doll(READ_TIMEOUT_S + 0.2) is True, "the other adapter")
    assert keys == [b"doll"]
    reader.answers.set()
    store.close()
