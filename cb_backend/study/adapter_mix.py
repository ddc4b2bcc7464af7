"""Which adapter each request of a replay goes through, and what it costs to load one: for the simulator.

A few names get most of the requests, by Zipf's law. What is not in it: the time of the adapters' own arithmetic (step
times are measured without them), and reading an adapter from its files for the first time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AdapterMix:
    """`num_names` adapters take turns in `num_slots` places of the device."""

    num_names: int
    skew: float  # exponent of Zipf's law: 0: all alike; 1: the second name half as often as the first
    num_slots: int  # max_loras
    num_bytes: float  # of one, as copied to the device
    bytes_per_s: float  # from the host to the device

    def __post_init__(self) -> None:
        if min(self.num_names, self.num_slots) < 1:
            raise ConfigError(f"{self.num_names} adapters in {self.num_slots} slots: both must be at least 1")
        if not (self.num_bytes > 0 and self.bytes_per_s > 0 and 0 <= self.skew < float("inf")):
            raise ConfigError(
                f"adapters of {self.num_bytes:g} bytes at {self.bytes_per_s:g} bytes/s with a skew of {self.skew:g}:"
                " the first two must be above 0, the skew 0 or more"
            )

    @property
    def load_seconds(self) -> float:
        """What a load adds to the step that it belongs to."""
        return self.num_bytes / self.bytes_per_s

    def draw(self, count: int, seed: int = 0) -> list[AdapterKey]:
        """An adapter for each of `count` requests; those of fewer requests are the first ones of more."""
        weights = 1.0 / np.arange(1, self.num_names + 1) ** self.skew
        found = np.random.default_rng(seed).choice(self.num_names, count, p=weights / weights.sum())
        return [b"adapter %d" % index for index in found.tolist()]

    def __str__(self) -> str:
        law = "drawn alike" if self.skew == 0 else f"drawn by Zipf's law of exponent {self.skew:g}"
        return (
            f"{self.num_names} adapters, {law}, over {self.num_slots} slots (max_loras); a load takes"
            f" {self.load_seconds * 1e3:.3g} ms"
        )
