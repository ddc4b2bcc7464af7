"""One thread's way from files to a device: pieces of a file through pinned memory on a stream of its own."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 16 << 20  # a multiple of every element's size
_NUM_HOST_PIECES = 2


class ReadLane:
    """Copies bytes of files to tensors of a device; for one thread. On a CPU nothing stands in between.

    Made in the thread that owns the targets, used in another one (`with lane:`), finished in the first.
    """

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        self._staged: Tensor | None = None  # on the device: a piece whose elements are yet to be cast
        self._turn = 0
        self._host: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            # What the targets' memory held before is done with.
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._host = [torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_HOST_PIECES)]
            self._is_free = [torch.cuda.Event() for _ in self._host]
            self._context: Any = torch.cuda.stream(self._stream)

    def __enter__(self) -> ReadLane:
        if self._stream is not None:
            self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._context.__exit__(kind, error, trace)

    def copy(self, file: int, offset: int, into: Tensor) -> None:
        """Bytes of the file from `offset` on to `into` [n] uint8, n at most the lane's piece. Raises `OSError`, and
        `EOFError(bytes there are)` for a file that ends before.
        """
        if self._stream is None:
            _read_into(file, offset, into)
            return
        host, is_free = self._host[self._turn], self._is_free[self._turn]
        self._turn = (self._turn + 1) % len(self._host)
        is_free.synchronize()
        part = host[: len(into)]
        _read_into(file, offset, part)
        into.copy_(part, non_blocking=True)
        is_free.record(self._stream)

    def copy_cast(self, file: int, offset: int, into: Tensor, dtype: torch.dtype) -> None:
        """Elements of type `dtype` to `into` [n], cast to its type. Raises as `copy` does."""
        if into.dtype == dtype:
            self.copy(file, offset, into.view(torch.uint8))
            return
        if self._staged is None:
            self._staged = torch.empty(self._piece_bytes, dtype=torch.uint8, device=self._device)
        staged = self._staged[: len(into) * dtype.itemsize]
        self.copy(file, offset, staged)
        into.copy_(staged.view(dtype))

    def record(self) -> torch.cuda.Event | None:
        """Happens when all that was copied by now is on the device; None: it is there."""
        return None if self._stream is None else self._stream.record_event()

    def finish(self) -> None:
        """What the calling thread's stream does from now on comes after all copies; the lane is not used again."""
        if self._stream is not None:
            self._stream.synchronize()  # the pinned memory goes


def _read_into(file: int, offset: int, into: Tensor) -> None:
    view = into.numpy().data
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            raise EOFError(offset + done)
        done += count
