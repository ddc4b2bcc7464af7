"""KV cache tensors without a model."""

from __future__ import annotations

import torch

from cb_backend.kv_cache.layout import KVLayout, one_group
from cb_backend.kv_cache.storage import KVCacheStorage


def empty_storage(
    num_blocks: int,
    *,
    num_layers: int = 1,
    num_kv_heads: int = 1,
    block_size: int = 16,
    head_dim: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> KVCacheStorage:
    """A cache of one group of layers."""
    layout = KVLayout(
        groups=one_group(num_layers),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        element_bytes=dtype.itemsize,
    )
    return KVCacheStorage(layout, num_blocks, dtype, torch.device(device))
