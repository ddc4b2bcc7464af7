"""Messages from one process to a few others of the same host, through a file that all of them map.

One writer, `num_readers` readers, each of which gets every message in order. The file is a header (how far each reader
is) and a ring of slots; a message takes as many slots as it needs, and may be longer than the ring. A slot is
    sequence u64 | bytes of the message from here on u32 | crc32 of all the rest of the slot u32 | bytes
and is there for a reader once its sequence number and its checksum are right, so that no order of writes is relied on.
How far a reader is it tells twice, as it is and inverted: a number of which the writer sees one byte before the others
must not be taken for progress.
This module does not know what messages mean, and never imports torch.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from zlib import crc32

SLOT_BYTES = 1 << 16
NUM_SLOTS = 64
FULL_TIMEOUT_S = 10.0  # a reader that holds up the writer for so long is lost

_HEAD = struct.Struct("<QII")
_SEQUENCE_AND_LENGTH = struct.Struct("<QI")
_COUNT = struct.Struct("<QQ")  # of slots read, and the same inverted
_ALL_BITS = 2**64 - 1
_LINE_BYTES = 64  # of a cache: each reader writes into one of its own
_SPIN_S, _SHORT_S, _LONG_S = 200e-6, 50e-6, 1e-3  # how a reader waits: it spins, naps, and when nothing comes sleeps
_NAPS_FOR_S = 10e-3


class ReaderBehindError(Exception):
    """A reader has not read for too long; what it has not read cannot be overwritten."""

    def __init__(self, reader: int, num_slots: int, seconds: float) -> None:
        super().__init__(f"reader {reader} is {num_slots} slots behind for {seconds:g} s")
        self.reader = reader
        self.seconds = seconds


class _Ring:
    """The mapped file."""

    def __init__(self, data: mmap.mmap, num_readers: int, slot_bytes: int, num_slots: int) -> None:
        self.data = data
        self.num_readers = num_readers
        self.slot_bytes, self.num_slots = slot_bytes, num_slots
        self.room = slot_bytes - _HEAD.size  # bytes of a message in a slot

    def place(self, sequence: int) -> int:
        """Of the slot that the sequence number, which counts from 1, goes to."""
        return self.num_readers * _LINE_BYTES + (sequence - 1) % self.num_slots * self.slot_bytes

    def num_read(self, reader: int) -> int | None:
        """Slots that the reader has read; None while it writes the number."""
        count, inverted = _COUNT.unpack_from(self.data, reader * _LINE_BYTES)
        return int(count) if count == inverted ^ _ALL_BITS else None

    def set_read(self, reader: int, count: int) -> None:
        _COUNT.pack_into(self.data, reader * _LINE_BYTES, count, count ^ _ALL_BITS)


def _checksum(sequence: int, num_left: int, part: bytes | memoryview) -> int:
    return crc32(part, crc32(_SEQUENCE_AND_LENGTH.pack(sequence, num_left)))


class RingWriter:
    """Makes the file. Close it at the end: mapped memory is given back once all processes have."""

    def __init__(
        self, path: Path, num_readers: int, *, slot_bytes: int = SLOT_BYTES, num_slots: int = NUM_SLOTS
    ) -> None:
        """Raises `FileExistsError` for a path that exists, `OSError` where there is no room for the file."""
        num_bytes = num_readers * _LINE_BYTES + num_slots * slot_bytes
        with open(path, "x+b") as file:
            file.write(bytes(num_bytes))  # written, so that a full disk is found now
            file.flush()
            self._ring = _Ring(mmap.mmap(file.fileno(), num_bytes), num_readers, slot_bytes, num_slots)
        for reader in range(num_readers):
            self._ring.set_read(reader, 0)
        self._sequence = 0  # of the last slot written
        self._read = [0] * num_readers  # slots, as far as is known

    def publish(self, message: bytes, timeout_s: float = FULL_TIMEOUT_S) -> None:
        """Returns when all of it is in the ring. Raises `ReaderBehindError` where a reader leaves no room for so long.

        Nothing can be published after that.
        """
        ring, view, start = self._ring, memoryview(message), 0
        while True:
            part = view[start : start + ring.room]
            self._wait_for_room(timeout_s)
            sequence = self._sequence + 1
            place = ring.place(sequence)
            body = place + _HEAD.size
            ring.data[body : body + len(part)] = part
            num_left = len(message) - start
            _HEAD.pack_into(ring.data, place, sequence, num_left, _checksum(sequence, num_left, part))
            self._sequence = sequence
            start += len(part)
            if start == len(message):
                return

    def _wait_for_room(self, timeout_s: float) -> None:
        ring = self._ring
        if self._sequence - min(self._read) < ring.num_slots:
            return
        give_up_at = time.monotonic() + timeout_s
        while True:
            for reader, known in enumerate(self._read):
                count = ring.num_read(reader)
                self._read[reader] = known if count is None else count
            least = min(self._read)
            if self._sequence - least < ring.num_slots:
                return
            if time.monotonic() > give_up_at:
                raise ReaderBehindError(self._read.index(least), ring.num_slots, timeout_s)
            time.sleep(_SHORT_S)

    def close(self) -> None:
        self._ring.data.close()


class RingReader:
    """One of the readers; each has a number of its own."""

    def __init__(
        self,
        path: Path,
        reader: int,
        num_readers: int,
        *,
        slot_bytes: int = SLOT_BYTES,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        """Numbers as the writer has them; `reader` counts from 0."""
        with open(path, "r+b") as file:
            self._ring = _Ring(mmap.mmap(file.fileno(), 0), num_readers, slot_bytes, num_slots)
        self._reader = reader
        self._sequence = 0  # of the last slot read
        self._parts: list[bytes] = []  # of a message that has not come whole

    def next(self, timeout_s: float) -> bytes | None:
        """The next message; None when it has not come by then. What has come of it is kept for the next call."""
        begin = time.monotonic()
        while True:
            found = self._slot()
            if found is not None:
                part, num_left = found
                self._parts.append(part)
                self._sequence += 1
                self._ring.set_read(self._reader, self._sequence)
                if num_left == len(part):
                    message = b"".join(self._parts)
                    self._parts = []
                    return message
                begin = time.monotonic()
                continue
            waited = time.monotonic() - begin
            if waited > timeout_s:
                return None
            if waited > _SPIN_S:
                time.sleep(_SHORT_S if waited < _NAPS_FOR_S else _LONG_S)

    def _slot(self) -> tuple[bytes, int] | None:
        """(the slot's part of a message, bytes left of the message with it); None while it is not there whole."""
        ring = self._ring
        place = ring.place(self._sequence + 1)
        sequence, num_left, checksum = _HEAD.unpack_from(ring.data, place)
        if sequence != self._sequence + 1:
            return None
        body = place + _HEAD.size
        part = ring.data[body : body + min(num_left, ring.room)]
        return (part, num_left) if _checksum(sequence, num_left, part) == checksum else None

    def close(self) -> None:
        self._ring.data.close()
