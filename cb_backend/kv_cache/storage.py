"""The memory of the paged KV cache: one tensor, and how many blocks of it a device can hold.

Which block belongs to whom is the block pool's business; nothing here knows requests. Block 0 is the null block, the
place for the writes of padding tokens: it is counted in `num_blocks` and never handed out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.fp8 import FP8, fp8_needs, is_fp8_capable
from cb_backend.kv_cache.host_memory import host_memory
from cb_backend.kv_cache.layout import KVLayout
from cb_backend.layers.step_metadata import LayerCache

_DEFAULT_CPU_BYTES = 1 << 30
_GIB = 1 << 30
USUAL_BLOCK_SIZE = 16


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The cache's element type: `auto` is the model's. Raises `ConfigError` for a GPU that cannot convert fp8."""
    if name == "auto":
        return dtype
    if not is_fp8_capable(device):
        raise ConfigError(kv_not_capable(name, fp8_needs(device)))
    return FP8


def kv_not_capable(name: str, needs: str) -> str:
    """What is said where a GPU lacks what the cache's element type needs."""
    return f"kv_cache_dtype is {name!r}, which {needs}. Use 'auto'"


class KVCacheStorage:
    """The blocks of a layout, zero at the start; `layers` are each layer's views of `data`, in the model's order."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """`num_blocks` counts the null block. `memory` gives a number of bytes (uint8, zeros) where they are not
        PyTorch's to give. Raises `ValueError` where the layout was made for another dtype."""
        if dtype.itemsize != layout.element_bytes:
            raise ValueError(f"a layout of {layout.element_bytes} bytes an element cannot hold {dtype}")
        self.layout = layout
        self.num_blocks = num_blocks
        shape = layout.shape(num_blocks)
        if memory is None:
            self.data = _zeros(shape, dtype, device)
        else:
            self.data = memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        rows = self.data.unbind(0)
        places = sorted(
            (layer, row, group) for group, of in enumerate(layout.groups) for row, layer in enumerate(of.layers)
        )
        self.layers = [LayerCache(rows[row], group) for _, row, group in places]


def size_kv_cache(
    config: EngineConfig,
    layout: KVLayout,
    device: torch.device,
    step_bytes: int = 0,
    of_device: tuple[int, int] | None = None,
) -> int:
    """How many blocks to allocate, null block included. Call it when the weights are in place.

    step_bytes: what else will be taken of the memory that is free now (activations, graphs); the cache leaves them.
    of_device: (free, total) bytes of a device that is not here; None: what this one has.
    Raises `ConfigError` with the figures and the settings to change when the memory does not suffice.
    """
    block_bytes = layout.bytes_per_block
    free_bytes, total_bytes = free_memory(device) if of_device is None else of_device
    available = free_bytes - step_bytes
    room = available
    if config.kv_cache_memory_bytes is not None:
        room, setting = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif device.type == "cuda":
        room -= int(total_bytes * (1 - config.gpu_memory_utilization))
        setting = "gpu_memory_utilization"
    else:
        room, setting = _DEFAULT_CPU_BYTES, "kv_cache_memory_bytes"
    num_blocks = layout.num_blocks_in(room)
    if config.num_gpu_blocks_override is not None:
        room, num_blocks, setting = available, config.num_gpu_blocks_override + 1, "num_gpu_blocks_override"
    least = 1 + len(layout.groups)  # the null block, and one for each group of layers
    if num_blocks >= least and num_blocks * block_bytes <= available:
        return num_blocks
    memory = f"{show_bytes(free_bytes)} of {show_bytes(total_bytes)} are free on the {device.type} device"
    steps = ""
    if step_bytes > 0:
        memory += f" and steps need {show_bytes(step_bytes)} of them"
        steps = ", lower max_num_batched_tokens or max_num_seqs"
    most = room * config.block_size // (least * block_bytes)
    if num_blocks < least and config.block_size > most >= USUAL_BLOCK_SIZE:
        raise ConfigError(
            f"no room for a KV cache: block_size is {config.block_size}, so that a block takes"
            f" {show_bytes(block_bytes)}, {least} are needed, and {setting} leaves {show_bytes(room)} for them;"
            f" {memory}. Lower block_size; at most {most} would fit, and {USUAL_BLOCK_SIZE} is usual"
        )
    if num_blocks < least:
        raise ConfigError(
            f"no room for a KV cache: a block of {config.block_size} tokens takes {show_bytes(block_bytes)} and "
            f"{setting} leaves {num_blocks} blocks, {least} are needed; {memory}. Raise {setting}{steps}, lower "
            "block_size, or use a smaller model or dtype"
        )
    raise ConfigError(
        f"not enough memory for the KV cache: {setting} asks for {num_blocks} blocks of {show_bytes(block_bytes)} = "
        f"{show_bytes(num_blocks * block_bytes)}, {memory}. Lower {setting}"
        + _most_of(setting, available, block_bytes)
        + steps.replace(", lower", " or")
    )


def _most_of(setting: str, num_bytes: int, block_bytes: int) -> str:
    """How much of a setting that asks for too much would fit."""
    most = num_bytes // block_bytes - 1  # beside the null block
    if most < 1:
        return ""
    return f" (at most {most if setting == 'num_gpu_blocks_override' else num_bytes} would fit)"


def free_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of the device; on a CPU what the host can give."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    return host_memory()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy's zeros are mapped when first touched: a large cache costs neither time nor memory until it is used.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


def show_bytes(num_bytes: int) -> str:
    """For messages."""
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB // 100 else f"{num_bytes / 1024:.1f} KiB"
