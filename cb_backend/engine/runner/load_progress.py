"""What is told while weights are loaded: whether they fit, before any is read, and how far they are."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.kv_cache.storage import free_memory, show_bytes

BAR_WIDTH = 20
LONGEST_SILENCE = 10.0  # seconds: a slow disk is told of oftener than at each quarter


def lack_of_memory(name: str, num_bytes: int, device: str, free_bytes: int, total_bytes: int) -> str | None:
    """What is said of weights that take more than the device has free."""
    if num_bytes <= free_bytes:
        return None
    return (
        f"not enough memory for the weights of {name!r}: they take {show_bytes(num_bytes)}, and "
        f"{show_bytes(free_bytes)} of {show_bytes(total_bytes)} are free on the {device} device. "
        "Use a smaller model or dtype, or quantization 'fp8', or end what else uses the memory"
    )


class LoadProgress:
    """One model's weights on their way to one device."""

    def __init__(self, name: str, device: torch.device, log: Callable[[str], None]) -> None:
        self._name = name
        self._device = device
        self._log = log
        self._started = self._told = time.monotonic()
        self._next_quarter = 1

    def begin(self, num_bytes: int) -> None:
        """`num_bytes` of weights will be on the device. Raises `ConfigError` with the figures if it has not so many."""
        if fault := lack_of_memory(self._name, num_bytes, self._device.type, *free_memory(self._device)):
            raise ConfigError(fault)
        self._started = self._told = time.monotonic()
        self._log(f"loading {self._name}: {show_bytes(num_bytes)} of weights")

    def at(self, done: int, total: int) -> None:
        """`done` of the `total` bytes of the files have been read. Tells of it at each quarter, and after a silence."""
        now = time.monotonic()
        if 4 * done < self._next_quarter * total and now - self._told < LONGEST_SILENCE:
            return
        self._told, self._next_quarter = now, 4 * done // total + 1
        filled, seconds = BAR_WIDTH * done // total, now - self._started
        rate = f" ({done / seconds / 1e9:.2f} GB/s)" if seconds > 0 else ""
        self._log(
            f"loading {self._name}: [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done / total:4.0%}, "
            f"{show_bytes(done)} of {show_bytes(total)} read in {seconds:.1f} s{rate}"
        )
