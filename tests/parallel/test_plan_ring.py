"""The ring that plans travel through: whole messages, in order, to every reader, or a clear end.

    python -m tests.parallel.fuzz_ring --messages 1000000
runs many more of what `test_random_messages_arrive` does.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cb_backend.parallel.plan_ring import ReaderBehindError, RingReader, RingWriter
from tests.parallel.fuzz_ring import fuzz

SMALL: dict[str, Any] = {"slot_bytes": 64, "num_slots": 4}  # 48 bytes of a message in a slot


def make_ring(folder: Path, num_readers: int = 1) -> tuple[RingWriter, list[RingReader]]:
    writer = RingWriter(folder / "ring", num_readers, **SMALL)
    return writer, [RingReader(folder / "ring", reader, num_readers, **SMALL) for reader in range(num_readers)]


@pytest.mark.parametrize("size", [0, 1, 47, 48, 49, 96, 192])
def test_messages_of_every_length_arrive_whole(size: int, tmp_path: Path) -> None:
    """Empty, shorter than a slot, just as long, longer; as long as the ring."""
    writer, readers = make_ring(tmp_path, 3)
    for _ in range(3):
        message = os.urandom(size)
        writer.publish(message)
        assert [reader.next(1) for reader in readers] == [message] * 3
    assert [reader.next(0) for reader in readers] == [None] * 3


def test_a_message_longer_than_the_ring_passes_while_it_is_read(tmp_path: Path) -> None:
    writer, (reader,) = make_ring(tmp_path)
    message = os.urandom(5000)
    thread = threading.Thread(target=writer.publish, args=(message,))
    thread.start()
    assert reader.next(10) == message
    thread.join()


def test_the_slowest_reader_holds_the_writer_up(tmp_path: Path) -> None:
    writer, (fast, slow) = make_ring(tmp_path, 2)
    for number in range(4):
        writer.publish(bytes([number]))
        assert fast.next(1) == bytes([number])
    with pytest.raises(ReaderBehindError, match=r"reader 1 is 4 slots behind for 0\.05 s"):
        writer.publish(b"too much", timeout_s=0.05)
    assert [slow.next(1) for _ in range(4)] == [bytes([number]) for number in range(4)]


def test_a_reader_that_goes_on_in_time_loses_nothing(tmp_path: Path) -> None:
    writer, (reader,) = make_ring(tmp_path)
    for number in range(4):
        writer.publish(bytes([number]))
    thread = threading.Thread(target=writer.publish, args=(b"last", 30.0))
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()  # there is no room
    assert [reader.next(10) for _ in range(5)] == [b"\0", b"\1", b"\2", b"\3", b"last"]
    thread.join()


@pytest.mark.parametrize("place", [0, 12, 16, 30])
def test_a_slot_that_is_not_whole_is_not_there(place: int, tmp_path: Path) -> None:
    """As a reader sees it that gets the sequence number before the rest: it waits until all is there."""
    writer, (reader,) = make_ring(tmp_path)
    writer.publish(bytes(range(40)))
    data = writer._ring.data
    at = writer._ring.place(1) + place
    right = data[at]
    data[at] = right ^ 1
    assert reader.next(0.01) is None
    data[at] = right
    assert reader.next(1) == bytes(range(40))


def test_a_new_sequence_number_before_an_old_message_is_not_believed(tmp_path: Path) -> None:
    """The slot's last message is whole, and the bytes of the next one begin with it."""
    writer, (reader,) = make_ring(tmp_path)
    for _ in range(4):
        writer.publish(b"abc")
        assert reader.next(1) == b"abc"
    writer._ring.data[writer._ring.place(5)] = 5
    assert reader.next(0.01) is None
    writer.publish(b"abcdef")
    assert reader.next(1) == b"abcdef"


@pytest.mark.parametrize(("before", "after"), [(255, 256), (256, 511), (0, 3)])
def test_half_a_number_of_a_reader_is_no_progress(before: int, after: int, tmp_path: Path) -> None:
    """Whichever of its bytes the writer sees first."""
    writer, _ = make_ring(tmp_path)
    ring = writer._ring
    ring.set_read(0, after)
    whole = bytes(ring.data[:16])
    for num_written in range(17):
        ring.set_read(0, before)
        ring.data[:num_written] = whole[:num_written]
        assert ring.num_read(0) in (None, before, after), num_written


def test_a_path_that_exists_is_not_taken_over(tmp_path: Path) -> None:
    make_ring(tmp_path)
    with pytest.raises(FileExistsError):
        make_ring(tmp_path)


@pytest.mark.parametrize("num_readers", [1, 3])
def test_random_messages_arrive(num_readers: int, tmp_path: Path) -> None:
    """Readers in processes of their own, some of them slow; one is killed at the end, which the writer is told."""
    report = fuzz(tmp_path / "ring", num_readers, num_messages=3000, seed=num_readers)
    assert report.num_messages == 3000
    assert report.num_longer_than_ring > 0
    assert "slots behind" in report.end
