"""A copy of a range's bytes in host memory, pinned where the range is a GPU's: at 50 GB/s it comes back.

Pinning itself is slow (16 GiB take 10 s on some hosts) and stops whoever shares the process, so it is done piece by
piece while there is nothing else to do, once. What cannot be pinned is not taken: the owner must do without the copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_backend.engine.runner.memory_range import MemoryRange
from cb_backend.kv_cache.storage import free_memory

PIECE_BYTES = 16 << 20  # a power of two: PyTorch rounds each pinned allocation up to one; pinned in 10 ms


class HostCopy:
    """Of all that is placed in the range when `prepare` is first called."""

    def __init__(self, of: MemoryRange) -> None:
        self._of = of
        self._pieces: list[Tensor] = []
        self.is_current = False  # holds what the range holds

    def prepare(self) -> bool:
        """Take one piece more of host memory; True: there is enough. Raises `MemoryError` where there is no more."""
        missing = len(self._of.data) - PIECE_BYTES * len(self._pieces)
        if missing <= 0:
            return True
        if free_memory(torch.device("cpu"))[0] < 2 * PIECE_BYTES:
            raise MemoryError("no host memory is left for a copy of the weights")
        is_pinned = self._of.data.device.type == "cuda"
        try:
            self._pieces.append(torch.empty(min(missing, PIECE_BYTES), dtype=torch.uint8, pin_memory=is_pinned))
        except RuntimeError as error:  # it may not be pinned, or not so much of it
            raise MemoryError(str(error).splitlines()[0]) from None
        return missing <= PIECE_BYTES

    def forget(self) -> None:
        """Give the host's memory back."""
        self._pieces = []
        self.is_current = False

    def save(self) -> None:
        """Have the range's bytes here; returns when they are."""
        for host, device in self._pairs():
            host.copy_(device, non_blocking=True)
        if self._of.data.device.type == "cuda":
            torch.cuda.synchronize()
        self.is_current = True

    def restore(self) -> None:
        """Begin to bring the bytes back: what is put on the current stream from now on finds them there."""
        for host, device in self._pairs():
            device.copy_(host, non_blocking=True)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._pieces, self._of.data.split(PIECE_BYTES), strict=True))
