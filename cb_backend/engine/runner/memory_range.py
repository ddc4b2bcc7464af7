"""Memory whose addresses stay and whose pages go and come: what a sleeping model gives up.

Tensors are placed in a range one after the other. While the range is given up nothing may touch them; taken back, they
are where they were (so that what a CUDA graph has recorded stays right), and hold zeros or anything.
This is the range of a CPU; `cuda_range` has a GPU's.
"""

from __future__ import annotations

import mmap
from typing import Protocol

import torch
from torch import Tensor

from cb_backend.contracts.rest import NoRoomError
from cb_backend.kv_cache.storage import free_memory, show_bytes

ALIGNMENT = 512  # bytes: of every tensor, as PyTorch's allocators have it
_MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on


class MemoryRange(Protocol):
    """Addresses for a number of bytes that is fixed when it is made."""

    @property
    def held_bytes(self) -> int:
        """Of memory, now."""
        ...

    @property
    def full_bytes(self) -> int:
        """Of memory that it holds once it is taken back."""
        ...

    @property
    def data(self) -> Tensor:
        """uint8 [bytes placed so far]"""
        ...

    def place(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], the next of the range. Raises `NoRoomError` where there is no memory for it."""
        ...

    def give_up(self) -> None:
        """Nothing on the device touches it any more."""
        ...

    def take_back(self) -> None:
        """Raises `NoRoomError` where there is not so much memory; nothing is taken then."""
        ...


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def no_room(num_bytes: int, device: torch.device) -> NoRoomError:
    """With what is free now."""
    free_bytes, total_bytes = free_memory(device)
    return NoRoomError(
        f"{show_bytes(num_bytes)} are needed, {show_bytes(free_bytes)} of {show_bytes(total_bytes)} are free on the "
        f"{device.type} device"
    )


class HostRange:
    """Of a CPU: anonymous pages. Nothing is taken before it is touched."""

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, max(aligned(num_bytes), 1), flags=flags)
        self._whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0
        self._is_held = True

    @property
    def held_bytes(self) -> int:
        return self._used if self._is_held else 0

    @property
    def full_bytes(self) -> int:
        return self._used

    @property
    def data(self) -> Tensor:
        return self._whole[: self._used]

    def place(self, num_bytes: int) -> Tensor:
        start, self._used = self._used, self._used + aligned(num_bytes)
        if self._used > len(self._whole):
            raise ValueError(f"{num_bytes} bytes more do not fit a range of {len(self._whole)}")
        return self._whole[start : start + num_bytes]

    def give_up(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)
        self._is_held = False

    def take_back(self) -> None:
        if self._is_held:
            return
        device = torch.device("cpu")
        if free_memory(device)[0] < self._used:
            raise no_room(self._used, device)
        self._is_held = True
