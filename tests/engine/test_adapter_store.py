"""Adapters on their way from files to host memory: pytest tests/engine/test_adapter_store.py"""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.errors import ConfigError, InvalidRequestError, UnavailableError
from cb_backend.contracts.messages import AdapterStats
from cb_backend.engine import adapters
from cb_backend.engine.adapter_wait import AdapterWait
from cb_backend.engine.adapters import REFUSAL_LASTS_S, WITHOUT_ROOM, AdapterStore
from cb_backend.support.adapter_files import Stamp
from tests.engine.adapter_reader import Packed, Reader, found, refusal, source
from tests.waiting import eventually


def test_files_are_read_once_and_kept() -> None:
    reader = Reader({"/adapters/doll": b"d"})
    store = AdapterStore(reader, 1)
    eventually(lambda: store.find(source("doll"), 0.0) == b"d", "the adapter")
    store.tidy(set, 0.0)
    assert store.find(source("doll"), 1.0) == b"d"
    assert reader.read_paths == ["/adapters/doll"]
    assert reader.packed_of is not None
    assert reader.packed_of(b"d").key == b"d"
    store.close()


def test_the_seconds_of_reads_are_told() -> None:
    store = AdapterStore(Reader({"/adapters/doll": b"d", "/adapters/sheep": b"s"}), 2)
    begin = time.perf_counter()
    found(store, source("doll"))
    first = store.read_seconds
    found(store, source("sheep"))
    assert 0 < first < store.read_seconds <= 2 * (time.perf_counter() - begin)
    store.close()


def test_changed_files_are_read_anew_and_the_same_content_is_kept_once() -> None:
    reader = Reader({"/adapters/doll": b"d", "/adapters/sheep": b"d"})
    store = AdapterStore(reader, 2)
    assert found(store, source("doll")) == found(store, source("sheep")) == b"d"
    reader.content["/adapters/doll"] = b"new"
    assert found(store, source("doll", mtime_ns=2)) == b"new"
    assert store.packed_of(b"d").key == b"d", "who still runs with it finds it"
    store.close()


def stamp_of(wanted: AdapterSource) -> Stamp:
    return Stamp(wanted.mtime_ns, wanted.size, wanted.file_id, wanted.ctime_ns)


def test_files_that_are_back_are_what_they_were_though_others_were_read_in_their_place() -> None:
    """A front end has seen the first version, the folder has the second when it is read, and then the first again."""
    first, second = source("doll", mtime_ns=1), source("doll", mtime_ns=2)
    reader, store = (made := Reader({})), AdapterStore(made, 4)
    versions = {b"1": stamp_of(first), b"2": stamp_of(second)}
    on_disk = b"2"

    def read(path: str) -> Packed:
        reader.read_paths.append(path)
        return Packed(on_disk, versions[on_disk])

    store._read = read
    assert found(store, first) == found(store, second) == b"2", "what is there is what they get"
    on_disk = b"1"
    assert found(store, first, now=10.0) == b"1"
    num_read = len(reader.read_paths)
    assert found(store, first, now=20.0) == b"1"
    assert found(store, second, now=20.0) == b"2"
    assert len(reader.read_paths) == num_read, "both are known"
    store.close()


def test_all_who_wait_for_files_get_what_was_read_in_their_place() -> None:
    store = AdapterStore(reader := Reader({}), 4)
    reads = []

    def read(path: str) -> Packed:
        reads.append(path)
        return Packed(b"2", stamp_of(source("doll", mtime_ns=2)))

    store._read = read
    waits = [AdapterWait(store, source("doll"), lambda key: None, 0.0) for _ in range(3)]
    met: list[list[object]] = []

    def is_met() -> bool:
        met.append([wait(0.0) for wait in waits])
        store.tidy(set, 0.0)
        return met[-1][-1] is True

    eventually(is_met, "the adapter")
    assert met[-1] == [True] * 3
    assert len(reads) == 1
    assert reader.packed_of is not None
    store.close()


def test_what_cannot_be_served_is_named_with_its_reason_and_not_read_again_at_once() -> None:
    reader = Reader()
    store = AdapterStore(reader, 2)
    for _ in range(3):
        error = refusal(store, source("doll"))
        assert isinstance(error, InvalidRequestError)
        assert str(error) == "adapter 'doll' cannot be served: /adapters/doll/adapter_config.json does not exist"
    assert len(reader.read_paths) == 1
    reader.content["/adapters/doll"] = b"d"
    assert found(store, source("doll"), now=REFUSAL_LASTS_S + 1) == b"d", "it may be mended without a newer time"
    store.close()


def test_mended_files_are_read_at_once() -> None:
    reader = Reader()
    store = AdapterStore(reader, 2)
    refusal(store, source("doll"))
    reader.content["/adapters/doll"] = b"d"
    assert found(store, source("doll", mtime_ns=2)) == b"d"
    store.close()


def test_an_unforeseen_error_of_reading_is_the_requests_alone() -> None:
    reader = Reader({"/adapters/doll": b"broken", "/adapters/sheep": b"s"})
    store = AdapterStore(reader, 2)
    assert "adapter 'doll' could not be read: ValueError: not what was foreseen" in str(refusal(store, source("doll")))
    assert found(store, source("sheep")) == b"s"
    stats = store.add_to(AdapterStats(max_loras=2))
    assert stats is not None
    assert (stats.num_reads, stats.num_refused, stats.num_kept) == (2, 1, 1)
    store.close()


class Memory:
    """What an adapter is read into."""


@pytest.mark.parametrize("kind", [ConfigError, UnavailableError, MemoryError, ValueError])
def test_of_what_was_refused_nothing_is_kept_but_the_reason(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks again within seconds is told the same: the error has no hold on what had been read by then."""
    monkeypatch.setattr(adapters.logger, "disabled", True)  # pytest keeps what is logged, errors with all they hold
    taken: list[weakref.ref[Memory]] = []

    def read(path: str) -> Packed:
        memory = Memory()
        taken.append(weakref.ref(memory))
        try:
            raise OSError("the numbers end early")
        except OSError as error:
            raise kind("broken") from error

    reader = Reader()
    reader.read = read  # type: ignore[method-assign]
    store = AdapterStore(reader, 4)
    reason = str(refusal(store, source("doll")))
    assert "broken" in reason or kind is MemoryError
    gc.collect()
    assert [memory() for memory in taken] == [None]
    assert str(refusal(store, source("doll"), now=1.0)) == reason
    store.close()


def test_the_least_recently_used_gives_its_room_but_nobody_who_is_in_use() -> None:
    reader = Reader({f"/adapters/{name}": name.encode() for name in "abcd"})
    store = AdapterStore(reader, 2)
    for name in "abc":
        found(store, source(name))
    with pytest.raises(KeyError):
        store.packed_of(b"a")
    found(store, source("d"), in_use=frozenset({b"b"}))
    assert store.packed_of(b"b"), "the least recently used, but in use"
    with pytest.raises(KeyError):
        store.packed_of(b"c")
    store.close()


def test_while_all_that_have_room_are_in_use_no_other_is_read_nor_late() -> None:
    reader = Reader({f"/adapters/{name}": name.encode() for name in "abc"})
    store = AdapterStore(reader, 2)
    for name in "ab":
        found(store, source(name))
    keys: list[bytes] = []
    wait = AdapterWait(store, source("c"), keys.append, 0.0)
    for now in (0.0, 20.0, 40.0, 1000.0):
        assert wait(now) is False
        store.tidy(lambda: {b"a", b"b"}, now)
    assert reader.read_paths == ["/adapters/a", "/adapters/b"]

    def has_come() -> bool:
        store.tidy(lambda: {b"b"}, 1001.0)
        return wait(1001.0) is True

    eventually(has_come, "the adapter, in the room of one that nobody uses")
    assert keys == [b"c"]
    assert store.packed_of(b"b")
    store.close()


def test_as_many_begin_at_once_as_there_is_room_for() -> None:
    reader = Reader({f"/adapters/{name}": name.encode() for name in "abcde"})
    store = AdapterStore(reader, 2)
    for name in "ab":
        found(store, source(name))
    reader.gate.clear()
    waits = [AdapterWait(store, source(name), lambda key: None, 0.0) for name in "cde"]
    assert [wait(0.0) for wait in waits] == [False] * 3
    store.tidy(set, 0.0)
    assert [wait(1.0) for wait in waits] == [False] * 3
    assert [store.turn_of(source(name)) == WITHOUT_ROOM for name in "cde"] == [False, False, True]
    reader.gate.set()
    store.close()


def test_what_was_read_for_somebody_who_left_is_forgotten_in_its_turn() -> None:
    reader = Reader({"/adapters/a": b"a", "/adapters/b": b"b"})
    store = AdapterStore(reader, 1)
    reader.gate.clear()
    assert store.find(source("a"), 0.0) is None
    reader.gate.set()

    def is_kept() -> bool:
        store.tidy(set, 0.0)
        stats = store.add_to(AdapterStats(max_loras=1))
        return stats is not None and stats.num_kept == 1

    eventually(is_kept, "what nobody asked for again")
    found(store, source("b"))
    store.tidy(set, 0.0)
    with pytest.raises(KeyError):
        store.packed_of(b"a")
    store.close()


def test_of_many_files_those_not_asked_for_longest_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_KNOWN", 2)
    reader = Reader({f"/adapters/{name}": name.encode() for name in "abc"})
    store = AdapterStore(reader, 9)
    for name in "abac":
        found(store, source(name))
    assert len(reader.read_paths) == 3
    found(store, source("a"))
    assert len(reader.read_paths) == 3
    found(store, source("b"))
    assert reader.read_paths[3:] == ["/adapters/b"]
    store.close()
    with pytest.raises(KeyError):
        store.packed_of(b"a")


def test_at_the_end_no_other_read_begins() -> None:
    names = "abcd"
    of_others = set(threading.enumerate())
    reader = Reader({f"/adapters/{name}": name.encode() for name in names})
    reader.gate.clear()
    store = AdapterStore(reader, len(names))
    for name in names:
        assert store.find(source(name), 0.0) is None
    eventually(lambda: store.turn_of(source("b")) is None, "as many reads as there are threads")
    threads = set(threading.enumerate()) - of_others
    store.close()
    reader.gate.set()
    for thread in threads:
        thread.join(timeout=30)
    assert len(threads) == 2
    assert sorted(reader.read_paths) == ["/adapters/a", "/adapters/b"]


def test_contents_that_come_again_under_another_name_have_been_used() -> None:
    reader = Reader({"/adapters/a": b"A", "/adapters/b": b"B", "/adapters/again": b"A", "/adapters/d": b"D"})
    store = AdapterStore(reader, 3)
    for name in ("a", "b", "again"):
        found(store, source(name))
    found(store, source("d"))
    reader.content["/adapters/e"] = b"E"
    found(store, source("e"))
    assert store.packed_of(b"A").key == b"A"
    with pytest.raises(KeyError):
        store.packed_of(b"B")
    store.close()
