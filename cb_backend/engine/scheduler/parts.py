"""What the scheduler's rooms share, made once and handed to each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from cb_backend.contracts.adapters import NO_ADAPTER, AdapterKey
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.messages import AdapterStats, EngineStats
from cb_backend.contracts.request import Request
from cb_backend.engine.scheduler.adapter_slots import AdapterSlots
from cb_backend.engine.scheduler.fair_share import FairShare
from cb_backend.engine.scheduler.order import RequestQueue
from cb_backend.engine.scheduler.plan import InFlightSteps
from cb_backend.engine.scheduler.slots import SlotTable
from cb_backend.engine.scheduler.stats import Counters, OutputLengths
from cb_backend.kv_cache.manager import KVCacheManager
from cb_backend.kv_cache.swap_space import SwapSpace


@dataclass(frozen=True, slots=True)
class Parts:
    """What is known of requests, slots, blocks and launched steps. Rooms change it by its own methods alone."""

    config: EngineConfig
    kv: KVCacheManager
    swap: SwapSpace
    table: SlotTable
    queue: RequestQueue
    share: FairShare
    in_flight: InFlightSteps
    adapters: AdapterSlots = field(default_factory=lambda: AdapterSlots(0))
    counters: Counters = field(default_factory=Counters)
    lengths: OutputLengths = field(default_factory=OutputLengths)

    def stats(self, step_id: int) -> EngineStats:
        """State at this moment, and counts since the engine's start."""
        kv, swap, queue = self.kv, self.swap, self.queue
        return EngineStats(
            step_id=step_id,
            num_running=self.table.num_running,
            num_waiting=queue.num_waiting,
            num_blocks=kv.num_usable_blocks,
            num_free_blocks=kv.num_free_blocks,
            num_evicted_blocks=kv.pool.num_evicted_blocks,
            num_refused=queue.num_refused,
            num_reset_blocks=kv.num_reset_blocks,
            num_swapped_out=swap.num_swapped_out,
            num_swapped_in=swap.num_swapped_in,
            num_host_blocks=swap.num_blocks,
            num_free_host_blocks=swap.num_free_blocks,
            num_swapped=swap.num_requests,
            adapters=self.adapter_stats(),
            **msgspec.structs.asdict(self.counters),
        )

    def adapter_stats(self) -> AdapterStats | None:
        """What is known here of adapters; None where none is taken."""
        if not self.adapters.num_slots:
            return None
        return AdapterStats(
            max_loras=self.adapters.num_slots,
            running=_names(self.table.by_id.values()),
            waiting=_names(self.queue.everyone),
            num_resident=self.adapters.num_resident,
            num_loads=self.adapters.num_loads,
        )

    def adapters_in_use(self) -> set[AdapterKey]:
        """Of everybody who waits or runs."""
        return {request.adapter for request in (*self.queue.everyone, *self.table.by_id.values()) if request.adapter}

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless blocks, slots and queue add up. For tests and idle moments; O(everything)."""
        self.table.check_integrity()
        self.queue.check_integrity()
        self.swap.check_integrity({request.request_id for request in self.queue})
        running, waiting = [*self.table.by_id.values()], self.queue.everyone
        assert not any(request.block_table for request in waiting), "a waiting request holds blocks"
        self.share.check_integrity(waiting, running)
        in_slots = Counter(request.adapter_slot for request in running if request.adapter)
        self.adapters.check_integrity(dict(in_slots + Counter(self.in_flight.deferred_adapters)))
        assert not any(request.adapter_slot != NO_ADAPTER for request in waiting), "a waiting request holds an adapter"
        self.kv.check_integrity([*(request.block_table for request in running), *self.in_flight.deferred_blocks])


def _names(requests: Iterable[Request]) -> tuple[str, ...]:
    """Of their adapters, each once."""
    return tuple({request.adapter_source.name: None for request in requests if request.adapter_source is not None})
