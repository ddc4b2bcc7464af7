"""A range of a GPU's virtual memory: physical pages are mapped into it, and unmapped when a model sleeps.

The calls are those of CUDA's driver, through `cuda-bindings`, which is asked for only where a model may sleep.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.runner.memory_range import aligned, no_room

PIECE_BYTES = 256 << 20  # that are mapped at a time while tensors are placed one by one


def driver() -> Any:
    """CUDA's driver. Raises `ConfigError` that says what to install."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        version = (torch.version.cuda or "13").partition(".")[0]
        raise ConfigError(
            f"idle_sleep_s needs the package cuda-bindings in the engine's Python ({error}): pip install "
            f"'cuda-bindings=={version}.*', or remove idle_sleep_s"
        ) from None


class DriverError(RuntimeError):
    """A call of the driver failed, for another reason than a lack of memory."""


class CudaRange:
    """See `memory_range.MemoryRange`. For the current device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._driver = driver()
        self._device = device
        index = torch.cuda.current_device() if device.index is None else device.index
        location_type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind = self._driver.CUmemAllocationProp()
        kind.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type, kind.location.id = location_type, index
        access = self._driver.CUmemAccessDesc()
        access.location.type, access.location.id = location_type, index
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._kind, self._access = kind, access
        least = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._page = int(self._call("cuMemGetAllocationGranularity", kind, least))
        self._capacity = self._in_pages(aligned(max(num_bytes, 1)))
        self._start = int(self._call("cuMemAddressReserve", self._capacity, 0, 0, 0))
        self._pieces: list[tuple[int, Any]] = []  # bytes and handle of what is mapped, from the range's start on
        self._used = 0

    @property
    def held_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self._pieces)

    @property
    def full_bytes(self) -> int:
        return self._in_pages(max(self._used, 1))

    @property
    def data(self) -> Tensor:
        return self._tensor(0, self._used)

    def place(self, num_bytes: int) -> Tensor:
        start, end = self._used, self._used + aligned(num_bytes)
        if end > self._capacity:
            raise ValueError(f"{num_bytes} bytes more do not fit a range of {self._capacity}")
        held = self.held_bytes
        if end > held:
            self._map(held, min(max(self._in_pages(end - held), PIECE_BYTES), self._capacity - held))
        self._used = end
        return self._tensor(start, num_bytes)

    def give_up(self) -> None:
        if not self._pieces:
            return
        self._call("cuMemUnmap", self._start, self.held_bytes)
        for _, handle in self._pieces:
            self._call("cuMemRelease", handle)
        self._pieces = []

    def take_back(self) -> None:
        if not self._pieces:
            self._map(0, self.full_bytes)

    def close(self) -> None:
        """The addresses go too; the range is not used again."""
        self.give_up()
        with contextlib.suppress(DriverError):
            self._call("cuMemAddressFree", self._start, self._capacity)

    def _map(self, start: int, num_bytes: int) -> None:
        """Put memory behind the range's next bytes. Raises `NoRoomError` where there is not so much."""
        handle = self._call("cuMemCreate", num_bytes, self._kind, 0, needed=num_bytes)
        try:
            self._call("cuMemMap", self._start + start, num_bytes, 0, handle, 0)
            try:
                self._call("cuMemSetAccess", self._start + start, num_bytes, [self._access], 1, needed=num_bytes)
            except Exception:
                self._call("cuMemUnmap", self._start + start, num_bytes)
                raise
        except Exception:
            self._call("cuMemRelease", handle)
            raise
        self._pieces.append((num_bytes, handle))

    def _call(self, name: str, *arguments: Any, needed: int = 0) -> Any:
        """What the call returns beside its success. `needed`: bytes of the device that it asks for."""
        code, *values = getattr(self._driver, name)(*arguments)
        if code == self._driver.CUresult.CUDA_SUCCESS:
            return values[0] if values else None
        if needed and code == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise no_room(needed, self._device)
        raise DriverError(f"{name} of CUDA's driver failed: {code!r}")

    def _in_pages(self, num_bytes: int) -> int:
        return -(-num_bytes // self._page) * self._page

    def _tensor(self, start: int, num_bytes: int) -> Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return torch.as_tensor(_Bytes(self._start + start, num_bytes), device=self._device)


class _Bytes:
    """Memory of the device, as PyTorch takes it over without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }
