"""What the engine's arguments make of a model's cache: what requests take of it, and which manager hands it out."""

from __future__ import annotations

from collections.abc import Sequence

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.messages import ModelInfo
from cb_backend.kv_cache.block_needs import BlockNeeds
from cb_backend.kv_cache.grouped_manager import GroupedKVCacheManager
from cb_backend.kv_cache.layout import ALL_TOKENS
from cb_backend.kv_cache.manager import KVCacheManager


def needs_of(config: EngineConfig, windows: Sequence[int], run_ahead: int) -> BlockNeeds:
    """What a request takes of groups with these windows. At most `run_ahead` steps are launched beside the oldest one,
    and a prompt may have the whole budget of each."""
    most_in_flight = (1 + run_ahead) * config.max_num_batched_tokens if config.enable_chunked_prefill else None
    return BlockNeeds(windows, config.block_size, most_in_flight)


def make_manager(config: EngineConfig, info: ModelInfo, run_ahead: int) -> KVCacheManager:
    """The manager for the model's groups of layers: the plain one, unless some of them give blocks back. `run_ahead`
    as in `needs_of`."""
    num_blocks = info.num_blocks + 1
    if info.kv_windows == (ALL_TOKENS,):
        return KVCacheManager(num_blocks, info.block_size, config.enable_prefix_caching)
    needs = needs_of(config, info.kv_windows, run_ahead)
    return GroupedKVCacheManager(num_blocks, needs, config.enable_prefix_caching)
