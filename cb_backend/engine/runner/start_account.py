"""What a start takes: seconds by stage, and bytes of the device by what holds them. A few lines of the log."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cb_backend.kernels.launch import products_on_defaults
from cb_backend.kv_cache.storage import free_memory, show_bytes
from cb_backend.models.decoder import DecoderForCausalLM

_MOST_SHAPES = 6  # that one line names


class StartAccount:
    """Of one engine. Whatever the device has in use more than at the last call is what the call names."""

    def __init__(self, device: torch.device, log: Callable[[str], None]) -> None:
        """Makes the device's context, where there is none yet."""
        self._device = device
        self._log = log
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._notes: dict[str, str] = {}
        self._last = time.perf_counter()
        self._used = 0
        self.ends("device", holds="context and other processes")

    def ends(self, stage: str, holds: str | None = None, num_bytes: int | None = None) -> None:
        """A stage of the start ends now. holds: what it has put on the device; num_bytes: so much of it, not what is
        measured (of a CPU nothing is: its memory is everybody's).
        """
        now = time.perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now
        grown = 0
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what is kept for nobody
            free_bytes, total_bytes = free_memory(self._device)
            grown, self._used = total_bytes - free_bytes - self._used, total_bytes - free_bytes
        if holds is not None:
            self._bytes[holds] = self._bytes.get(holds, 0) + (grown if num_bytes is None else num_bytes)

    def weights(self, model: DecoderForCausalLM) -> None:
        """The stage of the weights ends; what is in them once for a vocabulary is told apart."""
        head = sum(placement.target.nbytes for placement in model.lm_head.placements())  # none where they are tied
        embedding = model.embed_tokens.weight.nbytes + head
        num_bytes = sum(placement.target.nbytes for placement in model.placements())
        self.ends("weights", "weights", None if self._device.type == "cuda" else num_bytes)
        self._notes["weights"] = f" ({show_bytes(embedding)} of them embedding{' and head' * model.has_own_head})"

    def tell(self, largest_step: int = 0) -> None:
        """The two lines. largest_step: bytes that steps take of what is free."""
        free_bytes, total_bytes = free_memory(self._device)
        held = ", ".join(
            f"{holder} {show_bytes(num_bytes)}{self._notes.get(holder, '')}"
            for holder, num_bytes in self._bytes.items()
            if num_bytes > 0
        )
        steps = f", of which the largest step takes {show_bytes(largest_step)}" if largest_step else ""
        self._log(
            f"memory of the {self._device.type} device, {show_bytes(total_bytes)}: {held}, free "
            f"{show_bytes(free_bytes)}{steps}"
        )
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self._seconds.items())
        self._log(f"started in {sum(self._seconds.values()):.2f} s: {stages}")

    def tell_defaults(self) -> None:
        """One line, where products of the model have launch parameters that no search on this GPU has left."""
        found = products_on_defaults(self._device)
        if found:
            more = f" and {len(found) - _MOST_SHAPES} more" if len(found) > _MOST_SHAPES else ""
            self._log(
                f"launch parameters of {', '.join(found[:_MOST_SHAPES])}{more} are the defaults: no search on this GPU "
                "has left others; kernels/README.md tells how to look for better ones"
            )
