"""Copies KV blocks between the device and host memory, as plans say.

On a GPU the host memory is pinned and every copy is put on the current stream: copies are in order with the steps, and
the host does not wait for them. Which block goes where is the scheduler's business.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.step import StepPlan
from cb_backend.kv_cache.storage import KVCacheStorage, free_memory, show_bytes
from cb_backend.parallel.group import Agreed, Group, NoGroup

_GIB = 1 << 30
PIECE_BYTES = _GIB  # of host memory at a time, at most (or one block): little is lost where sizes are rounded up


class BlockSwapper:
    """Host memory for `num_blocks` blocks of a cache. Raises `ConfigError` where the host has not so much."""

    def __init__(self, storage: KVCacheStorage, num_blocks: int, group: Group | None = None) -> None:
        """group: whose devices each take as much, of the same host; None: there is one."""
        # As bytes: not every device copies every narrow type by index. As `KVLayout.shape`, head_dim in bytes.
        self._cache = storage.data.view(torch.uint8)
        self.num_blocks = num_blocks
        layers, _, *block = self._cache.shape
        # One block of all its layers lies in one place, so that it is one transfer.
        is_pinned = self._cache.device.type == "cuda"
        self._host = _HostBlocks(num_blocks, (layers, *block), group or NoGroup(), is_pinned=is_pinned)

    def apply(self, plan: StepPlan) -> None:
        """Make the plan's copies: first out, then in. Call before anything of the step itself."""
        if plan.copies.out:
            devices, hosts = zip(*plan.copies.out, strict=True)
            blocks = self._cache.index_select(1, self._to_device(devices)).transpose(0, 1).contiguous()
            for block, host in zip(blocks, hosts, strict=True):
                self._host[host].copy_(block, non_blocking=True)
        if plan.copies.back:
            devices, hosts = zip(*plan.copies.back, strict=True)
            blocks = self._cache.new_empty((len(hosts), *self._host.block_shape))
            for block, host in zip(blocks, hosts, strict=True):
                block.copy_(self._host[host], non_blocking=True)
            self._cache.index_copy_(1, self._to_device(devices), blocks.transpose(0, 1))

    def _to_device(self, block_ids: tuple[int, ...]) -> Tensor:
        ids = torch.tensor(block_ids, dtype=torch.int64)
        if self._cache.device.type != "cuda":
            return ids
        return ids.pin_memory().to(self._cache.device, non_blocking=True)


class _HostBlocks:
    """uint8 [*block_shape] of host memory for each of `num_blocks` blocks, in pieces of many blocks."""

    def __init__(self, num_blocks: int, block_shape: tuple[int, ...], group: Group, *, is_pinned: bool) -> None:
        """Raises `ConfigError` where there is not so much for all of the group: the system would promise more than it
        has, and end a process when it is used."""
        self.block_shape = block_shape
        block_bytes = math.prod(block_shape)
        self._piece_blocks = max(1, PIECE_BYTES // block_bytes)
        asked_bytes = num_blocks * block_bytes
        num_whole, rest = divmod(num_blocks, self._piece_blocks)
        sizes = [self._piece_blocks] * num_whole + [rest] * (rest > 0)
        needed_bytes = sum(pinned_bytes(size * block_bytes) if is_pinned else size * block_bytes for size in sizes)
        free_bytes, _ = free_memory(torch.device("cpu"))
        reason = f" (pinned, it takes {show_bytes(needed_bytes)})" if needed_bytes > asked_bytes else ""
        each = f" for each of {group.size} devices" if group.size > 1 else ""
        if group.size * needed_bytes <= free_bytes:
            group.agree(0, Agreed.LEAST)  # none of them takes its part before all have seen what is free
            try:
                self._pieces = [
                    torch.empty((size, *block_shape), dtype=torch.uint8, pin_memory=is_pinned) for size in sizes
                ]
                return
            except RuntimeError as error:  # memory that may not be pinned, or not so much of it
                reason = f" ({str(error).splitlines()[0]})"
        raise ConfigError(
            f"not enough host memory for swapped blocks: swap_space asks for {show_bytes(asked_bytes)}{each}, "
            f"{show_bytes(free_bytes)} are free{reason}; lower swap_space"
        )

    def __getitem__(self, block_id: int) -> Tensor:
        piece, index = divmod(block_id, self._piece_blocks)
        return self._pieces[piece][index]


def pinned_bytes(num_bytes: int) -> int:
    """What pinned memory of this size takes: PyTorch rounds each allocation up to a power of two
    (aten/src/ATen/core/CachingHostAllocator.h). One of 20 GiB would take 32."""
    return 1 << (num_bytes - 1).bit_length()


def num_swap_blocks(swap_space_gib: float, block_bytes: int) -> int:
    return int(swap_space_gib * _GIB) // block_bytes
