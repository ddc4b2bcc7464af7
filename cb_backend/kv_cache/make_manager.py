"""Which manager a model's cache has: the plain one, unless some of its layers give blocks back."""

from __future__ import annotations

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.messages import ModelInfo
from cb_backend.kv_cache.block_needs import BlockNeeds
from cb_backend.kv_cache.grouped_manager import GroupedKVCacheManager
from cb_backend.kv_cache.layout import ALL_TOKENS
from cb_backend.kv_cache.manager import KVCacheManager


def make_manager(config: EngineConfig, info: ModelInfo, run_ahead: int) -> KVCacheManager:
    """The manager for the model's groups of layers. At most `run_ahead` steps are launched beside the oldest one."""
    num_blocks, block_size = info.num_blocks + 1, info.block_size
    if info.kv_windows == (ALL_TOKENS,):
        return KVCacheManager(num_blocks, block_size, config.enable_prefix_caching)
    most_in_flight = (1 + run_ahead) * config.max_num_batched_tokens if config.enable_chunked_prefill else None
    needs = BlockNeeds(info.kv_windows, block_size, most_in_flight)
    return GroupedKVCacheManager(num_blocks, needs, config.enable_prefix_caching)
