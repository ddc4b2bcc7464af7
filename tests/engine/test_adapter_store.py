"""Adapters on their way from files to host memory: pytest tests/engine/test_adapter_store.py"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import CbError, ConfigError, InvalidRequestError, UnavailableError
from cb_backend.contracts.messages import AdapterStats, ModelInfo
from cb_backend.contracts.request import Request
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine import adapters
from cb_backend.engine.adapters import READ_TIMEOUT_S, REFUSAL_LASTS_S, WITHOUT_ROOM, AdapterStore, AdapterWait
from cb_backend.engine.llm_engine import LLMEngine
from tests.fakes.engine import info_of
from tests.fakes.runners import HashModel, HashRunner
from tests.waiting import eventually


@dataclass
class Packed:
    key: bytes


@dataclass
class Reader:
    """Gives each folder the key that its content says; `gate` holds reading up."""

    content: dict[str, bytes] = field(default_factory=dict)
    read_paths: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    packed_of: Callable[[bytes], Packed] | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def read(self, path: str) -> Packed:
        self.gate.wait()
        self.read_paths.append(path)
        if path not in self.content:
            raise ConfigError(f"{path}/adapter_config.json does not exist")
        if self.content[path] == b"broken":
            raise ValueError("not what was foreseen")
        return Packed(self.content[path])


def source(name: str, mtime_ns: int = 1) -> AdapterSource:
    return AdapterSource(name, f"/adapters/{name}", mtime_ns, 100)


def found(
    store: AdapterStore, wanted: AdapterSource, now: float = 0.0, in_use: frozenset[bytes] = frozenset()
) -> bytes:
    """The key, waited for while these are in use."""
    keys: list[bytes] = []

    def is_there() -> bool:
        key = store.find(wanted, now)
        store.tidy(lambda: in_use, now)
        keys.extend([] if key is None else [key])
        return key is not None

    eventually(is_there, "the adapter")
    return keys[0]


def refusal(store: AdapterStore, wanted: AdapterSource, now: float = 0.0) -> CbError:
    with pytest.raises(CbError) as caught:
        found(store, wanted, now)
    return caught.value


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


# ---- in an engine ------------------------------------------------------------------------------------------------


class AdaptedHashRunner(HashRunner):
    adapters: Reader


def engine_of(reader: Reader, num_adapter_slots: int = 2) -> LLMEngine:
    config = EngineConfig(model="fake", block_size=4, enable_lora=True, max_num_seqs=8)
    info: ModelInfo = info_of(config, 64, 256, (0,))
    runner = AdaptedHashRunner(HashModel(1000), 65, 4)
    runner.adapters = reader
    changed = {name: getattr(info, name) for name in info.__struct_fields__}
    return LLMEngine(config, runner, ModelInfo(**{**changed, "num_adapter_slots": num_adapter_slots}))


def add(engine: LLMEngine, request_id: int, wanted: AdapterSource | None, prompt: int = 9) -> Request:
    tokens = np.arange(1, 1 + prompt, dtype=np.int32)
    request = engine.make_request(request_id, tokens, TokenRules(max_tokens=4), adapter=wanted)
    engine.add_request(request)
    return request


def run(engine: LLMEngine) -> dict[int, int]:
    """Prompt tokens found in the prefix cache, by request."""
    cached: dict[int, int] = {}
    while engine.has_unfinished():
        assert engine.release_held() == []
        output = engine.step()
        cached.update(output.num_cached_tokens if output is not None else {})
    return cached


def test_a_request_waits_for_its_adapter_without_a_slot_while_others_run() -> None:
    reader = Reader({"/adapters/doll": b"d" * 16})
    reader.gate.clear()
    engine = engine_of(reader)
    add(engine, 1, source("doll"))
    add(engine, 2, None)
    while engine.scheduler.num_waiting + engine.scheduler.num_running > 1:
        engine.release_held()
        engine.step()
    assert engine.is_holding
    stats = engine.stats().adapters
    assert stats is not None
    assert stats.waiting == ("doll",)
    reader.gate.set()
    assert 1 in run(engine)
    assert not engine.is_holding
    engine.close()


def test_cached_prefixes_are_shared_by_content_alone() -> None:
    """Neither by the name (its files may have changed) nor with the model as it is."""
    reader = Reader({"/adapters/doll": b"d" * 16, "/adapters/twin": b"d" * 16, "/adapters/other": b"o" * 16})
    engine = engine_of(reader)
    for number, (wanted, num_cached) in enumerate(
        [
            (None, 0),
            (source("doll"), 0),
            (source("other"), 0),
            (source("twin"), 8),
            (source("doll"), 8),
            (None, 8),
        ]
    ):
        request = add(engine, number, wanted)
        assert run(engine) == {number: num_cached}, number
        assert request.adapter == (reader.content[wanted.path] if wanted else b"")
    reader.content["/adapters/doll"] = b"n" * 16
    add(engine, 10, source("doll", mtime_ns=2))
    assert run(engine) == {10: 0}, "the same name, other weights"
    engine.close()


def test_an_engine_without_adapters_says_so() -> None:
    engine = engine_of(Reader(), num_adapter_slots=0)
    with pytest.raises(InvalidRequestError, match=r"^LoRA feature is not enabled\.$"):
        add(engine, 1, source("doll"))
    assert engine.stats().adapters is None
    engine.close()


def test_when_nobody_needs_them_no_more_are_kept_than_is_configured() -> None:
    reader = Reader({f"/adapters/{name}": name.encode() * 16 for name in "abcdefghijkl"})
    engine = engine_of(reader)  # 2 slots, so 8 are kept
    for number, name in enumerate("abcdefghijkl"):
        add(engine, number, source(name))
    assert len(run(engine)) == 12
    assert engine.release_held() == []
    stats = engine.stats().adapters
    assert stats is not None
    assert stats.num_kept == 8
    engine.close()


def test_a_request_that_is_cancelled_while_its_adapter_is_read_leaves_nothing() -> None:
    reader = Reader({"/adapters/doll": b"d" * 16})
    reader.gate.clear()
    engine = engine_of(reader)
    add(engine, 1, source("doll"))
    assert engine.cancel(1)
    assert not engine.is_holding
    assert not engine.has_unfinished()
    reader.gate.set()
    engine.scheduler.check_integrity()
    engine.close()


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
