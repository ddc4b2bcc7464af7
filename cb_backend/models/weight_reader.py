"""Tensors of files to a device, at the speed of the disk or of the page cache.

Several threads read pieces of files. For a GPU each has two pieces of pinned memory and a stream: while one piece is on
its way to the device, the other is read. Elements that only change their type go straight to the target; tensors that
are transformed, quantised or packed are handed over whole, on the device, in the caller's thread. Knows bytes and
types; not what the tensors are for.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.read_lane import PIECE_BYTES, ReadLane
from cb_backend.models.safetensors_files import StoredTensor, check_unchanged

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_MOST_THREADS = 8
_MOST_WHOLE = 2  # tensors that are read whole and not yet taken: they are beside the weights on the device

Progress = Callable[[int, int], None]  # (bytes read, bytes in all)


@dataclass(slots=True)
class Read:
    """One tensor of a file, to be copied or taken."""

    name: str  # of the tensor, for messages
    stored: StoredTensor
    target: Tensor | None = None  # contiguous, as many elements: they are copied to it, and cast
    take: Callable[[Tensor], object] | None = None  # where there is no target: is given the tensor, on the device


@dataclass(slots=True)
class _Whole:
    """A tensor that is read to be taken: where it comes to, and how much of it has."""

    read: Read
    data: Tensor  # uint8 [num_bytes]
    missing: int  # bytes
    arrivals: list[torch.cuda.Event] = field(default_factory=list)


@dataclass(slots=True)
class _Piece:
    """Bytes `start` to `stop` of a tensor."""

    read: Read
    whole: _Whole | None
    start: int
    stop: int


def num_threads() -> int:
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))


def read_tensors(
    reads: Sequence[Read], device: torch.device, progress: Progress | None = None, num_lanes: int | None = None
) -> None:
    """Copy or hand over every tensor, in about this order. Returns when the device has all of them.

    Raises `ConfigError` that names file and tensor for a file that is gone, ends early, or changes meanwhile, and
    whatever a `take` raises.
    """
    total = sum(read.stored.num_bytes for read in reads)
    with contextlib.ExitStack() as stack:
        reading = _Reading(reads, _open_files(reads, stack), device)
        done = 0
        for num_bytes in stack.enter_context(contextlib.closing(reading.run(num_lanes or num_threads()))):
            done += num_bytes
            if progress is not None:
                progress(done, total)
        reading.check_files()
    for read in reads:
        if not read.stored.num_bytes and read.take is not None:  # no byte of it was ever read
            read.take(torch.empty(read.stored.shape, dtype=DTYPES[read.stored.dtype], device=device))


def read_tensor(stored: StoredTensor) -> Tensor:
    """A small one, on the CPU. Raises as `read_tensors` does."""
    tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    read_tensors([Read(stored.name, stored, tensor)], tensor.device, num_lanes=1)
    return tensor


def _open_files(reads: Sequence[Read], stack: contextlib.ExitStack) -> dict[Path, int]:
    """Descriptors of all files. Raises `ConfigError` for those that are gone or have changed since their headers."""
    files: dict[Path, int] = {}
    for read in reads:
        path, stamp = read.stored.path, read.stored.stamp
        if path in files:
            continue
        try:
            files[path] = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(
                f"{path.name}, which holds tensor {read.name}, cannot be opened any more ({error.strerror}); fetch "
                "the checkpoint again"
            ) from None
        stack.callback(os.close, files[path])
        check_unchanged(path, stamp, os.fstat(files[path]))
    return files


class _Reading:
    """One run of threads over a list of tensors. What they share is guarded by `_lock`, or is a queue."""

    def __init__(self, reads: Sequence[Read], files: dict[Path, int], device: torch.device) -> None:
        self._reads = reads
        self._files = files
        self._device = device
        self._is_dropped = _is_large(files)
        self._lock = threading.Lock()
        self._next_piece = threading.Lock()
        self._room = threading.Semaphore(_MOST_WHOLE)
        self._pieces = self._cut()
        self._events: queue.SimpleQueue[int | _Whole | BaseException | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._is_inference = torch.is_inference_mode_enabled()  # a thread's own, and targets may be made in it

    def run(self, num_lanes: int) -> Generator[int, None, None]:
        """Yields the bytes of each piece that is there."""
        largest = max((read.stored.num_bytes for read in self._reads), default=0)
        lanes = [ReadLane(self._device, min(PIECE_BYTES, largest)) for _ in range(num_lanes)]
        threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"read-weights-{index}", daemon=True)
            for index, lane in enumerate(lanes)
        ]
        for thread in threads:
            thread.start()
        try:
            working = num_lanes
            while working:
                event = self._events.get()
                if event is None:
                    working -= 1
                elif isinstance(event, BaseException):
                    raise event
                elif isinstance(event, int):
                    yield event
                else:
                    self._hand_over(event)
        finally:
            self._is_stopped = True
            self._room.release(num_lanes)  # whoever waits sees that it is over
            for thread in threads:
                thread.join()
            for lane in lanes:
                lane.finish()

    def check_files(self) -> None:
        stamps = {read.stored.path: read.stored.stamp for read in self._reads}
        for path, descriptor in self._files.items():
            check_unchanged(path, stamps[path], os.fstat(descriptor))

    # ---- the caller's thread ---------------------------------------------------------------------------------------

    def _hand_over(self, whole: _Whole) -> None:
        if whole.arrivals:
            stream = torch.cuda.current_stream(whole.data.device)
            for arrival in whole.arrivals:
                stream.wait_event(arrival)
            whole.data.record_stream(stream)  # its memory is another stream's
        read = whole.read
        assert read.take is not None
        read.take(whole.data.view(DTYPES[read.stored.dtype]).view(read.stored.shape))
        self._room.release()

    # ---- the readers' threads --------------------------------------------------------------------------------------

    def _work(self, lane: ReadLane) -> None:
        try:
            with lane, torch.inference_mode(self._is_inference):
                while True:
                    with self._next_piece:
                        piece = None if self._is_stopped else next(self._pieces, None)
                    if piece is None:
                        break
                    self._move(lane, piece)
        except BaseException as error:  # the caller raises it
            self._events.put(error)
        self._events.put(None)

    def _cut(self) -> Iterator[_Piece]:
        """Waits for room before a tensor that is taken whole. Runs in a reader's thread, one at a time."""
        for read in self._reads:
            num_bytes, whole = read.stored.num_bytes, None
            if read.target is None and num_bytes:
                self._room.acquire()
                if self._is_stopped:
                    return
                whole = _Whole(read, torch.empty(num_bytes, dtype=torch.uint8, device=self._device), num_bytes)
            for start in range(0, num_bytes, PIECE_BYTES):
                yield _Piece(read, whole, start, min(start + PIECE_BYTES, num_bytes))

    def _move(self, lane: ReadLane, piece: _Piece) -> None:
        read, size = piece.read, piece.stop - piece.start
        stored, file = read.stored, self._files[read.stored.path]
        offset = stored.offset + piece.start
        try:
            if piece.whole is not None:
                lane.copy(file, offset, piece.whole.data[piece.start : piece.stop])
            else:
                assert read.target is not None
                dtype = DTYPES[stored.dtype]
                elements = read.target.view(-1)[piece.start // dtype.itemsize : piece.stop // dtype.itemsize]
                lane.copy_cast(file, offset, elements, dtype)
        except EOFError as error:
            raise ConfigError(
                f"{stored.path.name} ends at byte {error.args[0]}, but tensor {read.name} goes from {stored.offset} to "
                f"{stored.offset + stored.num_bytes}; fetch the checkpoint again"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{stored.path.name} cannot be read to its end: {size} bytes of tensor {read.name} at {offset} "
                f"({error.strerror}); fetch the checkpoint again, or look to its disk"
            ) from None
        if self._is_dropped:
            os.posix_fadvise(file, offset, size, os.POSIX_FADV_DONTNEED)
        if piece.whole is not None:
            self._count(lane, piece.whole, size)
        self._events.put(size)

    def _count(self, lane: ReadLane, whole: _Whole, size: int) -> None:
        arrival = lane.record()
        with self._lock:
            whole.missing -= size
            if arrival is not None:
                whole.arrivals.append(arrival)
            is_whole = not whole.missing
        if is_whole:
            self._events.put(whole)


def _is_large(files: dict[Path, int]) -> bool:
    """Whether the files would push everything else out of the page cache: they take more than a third of memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 3 * sum(os.fstat(file).st_size for file in files.values()) > memory
