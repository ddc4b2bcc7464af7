"""Copies KV blocks between the device and host memory, as plans say.

On a GPU the host memory is pinned and every copy is put on the current stream: copies are in order with the steps, and
the host does not wait for them. Which block goes where is the scheduler's business.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cb_backend.errors import ConfigError
from cb_backend.kv_cache.storage import KVCacheStorage, free_memory, show_bytes
from cb_backend.outputs import SchedulerOutput

_GIB = 1 << 30


class BlockSwapper:
    """Host memory for `num_blocks` blocks of a cache. Raises `ConfigError` where the host has not so much."""

    def __init__(self, storage: KVCacheStorage, num_blocks: int) -> None:
        # As bytes: not every device copies every narrow type by index.
        # [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim * bytes of an element]
        self._cache = storage.data.view(torch.uint8)
        self.num_blocks = num_blocks
        layers, _, *block = self._cache.shape
        # One block of all layers is one piece, so that it is one transfer.
        self._host = _host_memory((num_blocks, layers, *block), is_pinned=self._cache.device.type == "cuda")

    def apply(self, plan: SchedulerOutput) -> None:
        """Make the plan's copies: first out, then in. Call before anything of the step itself."""
        if plan.swap_out:
            devices, hosts = zip(*plan.swap_out, strict=True)
            blocks = self._cache.index_select(1, self._to_device(devices)).transpose(0, 1).contiguous()
            for block, host in zip(blocks, hosts, strict=True):
                self._host[host].copy_(block, non_blocking=True)
        if plan.swap_in:
            devices, hosts = zip(*plan.swap_in, strict=True)
            blocks = self._cache.new_empty((len(hosts), *self._host.shape[1:]))
            for block, host in zip(blocks, hosts, strict=True):
                block.copy_(self._host[host], non_blocking=True)
            self._cache.index_copy_(1, self._to_device(devices), blocks.transpose(0, 1))

    def _to_device(self, block_ids: tuple[int, ...]) -> Tensor:
        ids = torch.tensor(block_ids, dtype=torch.int64)
        if self._cache.device.type != "cuda":
            return ids
        return ids.pin_memory().to(self._cache.device, non_blocking=True)


def _host_memory(shape: tuple[int, ...], *, is_pinned: bool) -> Tensor:
    """uint8 of this shape. The system would promise more than it has, and end the process when it is used."""
    free_bytes, _ = free_memory(torch.device("cpu"))
    num_bytes = math.prod(shape)
    reason = ""
    if num_bytes <= free_bytes:
        try:
            return torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned)
        except RuntimeError as error:  # memory that may not be pinned, or not so much of it
            reason = f" ({str(error).splitlines()[0]})"
    raise ConfigError(
        f"not enough host memory for swapped blocks: swap_space asks for {show_bytes(num_bytes)}, "
        f"{show_bytes(free_bytes)} are free{reason}; lower swap_space"
    )


def num_swap_blocks(swap_space_gib: float, block_bytes: int) -> int:
    return int(swap_space_gib * _GIB) // block_bytes
