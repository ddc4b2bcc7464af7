"""Memory that rank 0 hands to others: pytest tests/parallel/test_hand_over.py"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cb_backend.parallel.hand_over import LABEL_BYTES, Giver, NotTakenError, new_connection, new_memory, take_all
from tests.waiting import eventually


def label(number: int) -> bytes:
    return number.to_bytes(LABEL_BYTES, "little")


class Ranks:
    """Others, as threads, which keep what they have taken."""

    def __init__(self, count: int, timeout_s: float = 30.0) -> None:
        self.taken: dict[int, dict[bytes, bytes]] = {rank: {} for rank in range(1, count + 1)}
        self.before_taking: Callable[[int, bytes], None] = lambda rank, label: None
        ends, self.threads = {}, []
        for rank in self.taken:
            ends[rank], other = new_connection()
            self.threads.append(threading.Thread(target=take_all, args=(other, self._take_of(rank)), daemon=True))
        self.giver = Giver(ends, timeout_s)
        for thread in self.threads:
            thread.start()

    def _take_of(self, rank: int) -> Callable[[bytes, mmap.mmap], None]:
        def take(its_label: bytes, memory: mmap.mmap) -> None:
            self.before_taking(rank, its_label)
            self.taken[rank][its_label] = bytes(memory)

        return take

    def give(self, number: int, content: bytes) -> None:
        descriptor, memory = new_memory(len(content))
        try:
            memory[:] = content
            self.giver.give(label(number), descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self.giver.close()
        for thread in self.threads:
            thread.join(timeout=30)
            assert not thread.is_alive(), "it ends when rank 0 has"


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3)
    yield made
    made.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_every_rank_has_taken_it_when_it_is_given(ranks: Ranks) -> None:
    before = num_descriptors()
    for number in range(20):
        content = bytes([number]) * (5000 + number)
        ranks.give(number, content)
        for taken in ranks.taken.values():
            assert taken[label(number)] == content
    eventually(lambda: num_descriptors() == before, "all descriptors are closed")


def test_new_memory_is_zeros_and_what_there_is_not_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor, memory = new_memory(4097)
    assert bytes(memory) == bytes(4097)
    os.close(descriptor)
    before = num_descriptors()
    with pytest.raises(MemoryError, match=f"{1 << 62} bytes to share with other processes"):
        new_memory(1 << 62)
    assert num_descriptors() == before


def test_what_a_rank_cannot_take_is_said_and_the_next_is_given(ranks: Ranks) -> None:
    def refuse(rank: int, its_label: bytes) -> None:
        if rank == 2 and its_label == label(1):
            raise MemoryError("a thousand bytes too few")

    ranks.before_taking = refuse
    with pytest.raises(NotTakenError, match=r"^rank 2 could not take it: MemoryError: a thousand bytes too few$"):
        ranks.give(1, b"one")
    ranks.give(2, b"two")
    assert ranks.taken == {1: {label(1): b"one", label(2): b"two"}, 2: {label(2): b"two"}, 3: ranks.taken[1]}


def test_a_long_reason_is_cut(ranks: Ranks) -> None:
    def refuse(rank: int, its_label: bytes) -> None:
        raise ValueError("long " * 10_000)

    ranks.before_taking = refuse
    with pytest.raises(NotTakenError, match=r"rank 1 could not take it: ValueError: long long.*; rank 2 could not"):
        ranks.give(1, b"one")


def test_who_is_late_is_not_waited_for_and_his_answer_is_not_taken_for_another() -> None:
    ranks, gate = Ranks(2, timeout_s=0.2), threading.Event()

    def wait(rank: int, its_label: bytes) -> None:
        if rank == 1 and its_label == label(1):
            gate.wait()
            raise ValueError("late, and wrong")

    ranks.before_taking = wait
    with pytest.raises(NotTakenError, match=r"^rank 1 has not taken it within 0.2 s$"):
        ranks.give(1, b"one")
    gate.set()
    ranks.give(2, b"two")
    assert [taken[label(2)] for taken in ranks.taken.values()] == [b"two", b"two"]
    ranks.close()


def test_a_rank_that_is_gone_is_said(ranks: Ranks) -> None:
    end, other = new_connection()
    giver = Giver({4: end})
    other.close()
    descriptor, _ = new_memory(8)
    for _ in range(2):
        with pytest.raises(NotTakenError, match=r"^rank 4 is gone$"):
            giver.give(label(1), descriptor)
    os.close(descriptor)
    giver.close()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EPIPE, "is gone"),
        (errno.ECONNRESET, "is gone"),
        (errno.ENOTCONN, "is gone"),
        (errno.ESRCH, "is gone"),
        (errno.ETOOMANYREFS, "could not be reached: Too many references: cannot splice"),
        (errno.ENOBUFS, "could not be reached: No buffer space available"),
        (errno.EBADF, "is gone"),  # closed at this end: the ranks end
    ],
)
def test_only_what_means_that_a_rank_is_gone_is_said_to(
    number: int, told: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a rank waited for that has got nothing to answer to."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as failing:
        failing.setattr(socket, "send_fds", fail)
        began = time.monotonic()
        with pytest.raises(NotTakenError) as error:
            ranks.give(1, b"one")
    assert str(error.value) == "; ".join(f"rank {rank} {told}" for rank in ranks.taken)
    assert time.monotonic() - began < 10
    ranks.give(2, b"two")
    assert all(taken == {label(2): b"two"} for taken in ranks.taken.values())


def test_who_waits_for_an_answer_is_let_go_at_the_end() -> None:
    ranks, gate, is_taking = Ranks(1), threading.Event(), threading.Event()

    def wait(rank: int, its_label: bytes) -> None:
        is_taking.set()
        gate.wait()

    ranks.before_taking = wait
    with ThreadPoolExecutor(1) as pool:
        given = pool.submit(ranks.give, 1, b"one")
        is_taking.wait()
        ranks.giver.close()
        with pytest.raises(NotTakenError, match="rank 1 is gone"):
            given.result(timeout=30)
        gate.set()
    ranks.close()


def test_threads_give_side_by_side(ranks: Ranks) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: ranks.give(number, bytes([number]) * 3000), range(40)))
    for taken in ranks.taken.values():
        assert taken == {label(number): bytes([number]) * 3000 for number in range(40)}


def test_memory_whose_descriptor_does_not_come_is_not_taken() -> None:
    """As where a process has as many open files as it may."""
    end, other = new_connection()
    thread = threading.Thread(target=take_all, args=(other, lambda its_label, memory: None), daemon=True)
    thread.start()
    end.send(label(1))
    assert end.recv(4096) == label(1) + b"it came without its memory; raise the limit of open files"
    end.shutdown(socket.SHUT_RDWR)
    end.close()
    thread.join(timeout=30)
