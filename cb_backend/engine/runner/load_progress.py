"""What is told while weights are loaded: whether they fit, before any is read, and how far they are."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.kv_cache.storage import free_memory, show_bytes

BAR_WIDTH = 20


class LoadProgress:
    """One model's weights on their way to one device."""

    def __init__(self, name: str, device: torch.device, log: Callable[[str], None]) -> None:
        self._name = name
        self._device = device
        self._log = log
        self._num_bytes = 0
        self._started = time.monotonic()

    def begin(self, num_bytes: int) -> None:
        """`num_bytes` of weights will be on the device. Raises `ConfigError` with the figures if it has not so many."""
        free_bytes, total_bytes = free_memory(self._device)
        if num_bytes > free_bytes:
            raise ConfigError(
                f"not enough memory for the weights of {self._name!r}: they take {show_bytes(num_bytes)}, and "
                f"{show_bytes(free_bytes)} of {show_bytes(total_bytes)} are free on the {self._device.type} device. "
                "Use a smaller model or dtype, or quantization 'fp8', or end what else uses the memory"
            )
        self._num_bytes, self._started = num_bytes, time.monotonic()
        self._log(f"loading {self._name}: {show_bytes(num_bytes)} of weights")

    def at(self, fraction: float) -> None:
        """So much of them is there."""
        done = round(BAR_WIDTH * fraction)
        seconds = time.monotonic() - self._started
        self._log(
            f"loading {self._name}: [{'#' * done}{'.' * (BAR_WIDTH - done)}] {fraction:4.0%}, "
            f"{show_bytes(int(fraction * self._num_bytes))} in {seconds:.1f} s"
        )
