"""The device that a model is to be loaded on, before anything is: what it is called, how much of it the model takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cb_backend.contracts.config import EngineConfig
from cb_backend.engine.runner.runner_factory import resolve_device
from cb_backend.kv_cache.storage import free_memory
from cb_backend.models.checkpoint import resolve_checkpoint
from cb_backend.models.weight_files import find_weight_files


class Card(NamedTuple):
    name: str  # of its own among all that there are
    needed_bytes: int
    free_bytes: Callable[[], int]


def card_of(config: EngineConfig, weights: Path | None = None) -> Card:
    """`weights`: folder of those to be loaded, where they are not the model's own. Raises `ConfigError` for a device
    that is not there."""
    import torch

    device = resolve_device(config.device)
    if device.type != "cuda":
        return Card("cpu", 0, lambda: free_memory(device)[0])
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return Card(str(uuid), _needed_bytes(config, weights, free_memory(device)[1]), lambda: free_memory(device)[0])


def _needed_bytes(config: EngineConfig, weights: Path | None, total_bytes: int) -> int:
    """About as much as the model will take: a cache that is not given in bytes takes all of the model's share."""
    if config.kv_cache_memory_bytes is None or (config.load_format == "dummy" and weights is None):
        return int(config.gpu_memory_utilization * total_bytes)
    files = find_weight_files(weights or resolve_checkpoint(config.model))
    return min(sum(path.stat().st_size for path in files) + config.kv_cache_memory_bytes, total_bytes)
