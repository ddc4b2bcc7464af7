"""What each of an engine's devices has of a checkpoint, and what a card has left beside it: for `check` and `plan`."""

from __future__ import annotations

from dataclasses import dataclass

from cb_backend.cli.check_cards import CacheRoom, Card, cache_layout, cache_room, card_faults
from cb_backend.cli.check_findings import Findings, adapter_shard_bytes, shard_bytes
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.kv_cache.layout import KVLayout
from cb_backend.models.sharding import shard_spec
from cb_backend.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Of one of `tensor_parallel_size` devices."""

    spec: ModelSpec
    layout: KVLayout
    weight_bytes: int
    adapter_bytes: int  # of the places for adapters


def device_share(found: Findings, config: EngineConfig) -> DeviceShare:
    """`found` must have a specification and a dtype. Raises `ConfigError` where the model cannot be shared out."""
    assert found.spec is not None
    assert found.dtype is not None
    spec = shard_spec(found.spec, config.tensor_parallel_size)
    layout = cache_layout(config, spec, found.dtype, found.max_model_len)
    return DeviceShare(spec, layout, shard_bytes(found, config), adapter_shard_bytes(found, config))


def room_beside(
    share: DeviceShare, found: Findings, config: EngineConfig, card: Card, length: int
) -> tuple[CacheRoom | None, list[str]]:
    """What the card's cache holds in requests of `length` tokens (as `cache_room` has it), none longer than
    `max_model_len`; None where it does not fit. And why the card does not do, in the engine's words."""
    assert found.dtype is not None
    faults = card_faults(card, config, found.quantization, found.dtype)
    sizes = share.weight_bytes, share.adapter_bytes
    try:
        room = cache_room(config, share.spec, found.dtype, share.layout, card, *sizes, length)
    except ConfigError as error:
        return None, [*faults, str(error)]
    longest = min(room.longest_request, found.max_model_len or room.longest_request)
    return CacheRoom(room.num_tokens, longest), faults
