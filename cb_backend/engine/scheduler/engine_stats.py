"""The scheduler's state and counts as one message."""

from __future__ import annotations

from cb_backend.contracts.messages import EngineStats
from cb_backend.engine.scheduler.request_queue import RequestQueue
from cb_backend.engine.scheduler.slot_table import SlotTable
from cb_backend.engine.scheduler.step_result import StepCounters
from cb_backend.engine.scheduler.swap_space import SwapSpace
from cb_backend.kv_cache.manager import KVCacheManager


def engine_stats(
    step_id: int, counters: StepCounters, table: SlotTable, queue: RequestQueue, kv: KVCacheManager, swap: SwapSpace
) -> EngineStats:
    """State at this moment, and counts since the engine's start."""
    return EngineStats(
        step_id=step_id,
        num_running=table.num_running,
        num_waiting=len(queue) + queue.num_held,
        num_blocks=kv.num_usable_blocks,
        num_free_blocks=kv.num_free_blocks,
        num_preemptions=counters.num_preemptions,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_cached_prompt_tokens=counters.num_cached_prompt_tokens,
        num_output_tokens=counters.num_output_tokens,
        num_cancelled=counters.num_cancelled,
        num_evicted_blocks=kv.pool.num_evicted_blocks,
        num_refused=queue.num_refused,
        num_reset_blocks=kv.num_reset_blocks,
        num_timed_out=counters.num_timed_out,
        num_swapped_out=swap.num_swapped_out,
        num_swapped_in=swap.num_swapped_in,
        num_host_blocks=swap.num_blocks,
        num_free_host_blocks=swap.num_free_blocks,
        num_swapped=swap.num_requests,
    )
