"""What must be so in a simulated world, computed from the documents and not from the engine's own bookkeeping."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.request import Request
from cb_backend.engine.scheduler.scheduler import Scheduler
from cb_backend.kv_cache.block_pool import CachedBlock
from cb_backend.kv_cache.manager import KVCacheManager
from tests.fakes.hash_rule import GROUP_FACTOR, HashModel, salt_number
from tests.fakes.runners import HashRunner
from tests.simulation.scenario import Arrival, Scenario


def refuses_by_queue(
    config: EngineConfig, scheduler: Scheduler, kv: KVCacheManager, num_prompt_tokens: int
) -> tuple[bool, int]:
    """Whether a newcomer is to be refused, and the figure that the refusal must name."""
    num_free_slots = min(config.max_num_seqs, config.max_num_batched_tokens) - scheduler.num_running
    waiting = scheduler._queue.everyone
    if len(waiting) >= config.max_queue_size + num_free_slots:
        return True, config.max_queue_size
    num_tokens = sum(len(request.token_ids) for request in waiting)
    free = kv.num_free_blocks // kv.num_groups * config.block_size if num_free_slots else 0
    return num_tokens + num_prompt_tokens > config.max_queue_tokens + free, config.max_queue_tokens


def is_due(config: EngineConfig, request: Request, arrived_at: float, now: float, has_started: bool) -> bool:
    """Whether a timeout of the request, its own or the configured one, has passed."""
    own = request.scheduling
    limit = own.timeout_ms or config.timeout_ms
    queue_limit = own.queue_timeout_ms or config.queue_timeout_ms
    if queue_limit is not None and not has_started and now >= arrived_at + queue_limit / 1000:
        return True
    return limit is not None and now >= arrived_at + limit / 1000


def queue_place(config: EngineConfig, priority: int, arrived_at: float, number: int) -> tuple[float, ...]:
    """Place in the queue: arrival, moved by priority_aging_s for each step of priority."""
    aging_s = config.priority_aging_s
    return (arrived_at + priority * aging_s, number) if aging_s else (priority, arrived_at, number)


def lone_output(scenario: Scenario, model: HashModel, arrival: Arrival, salt: bytes) -> list[int]:
    """What a request must produce whatever runs beside it, but for stop strings."""
    total = min(
        len(arrival.prompt) + arrival.params.most_tokens,
        scenario.max_model_len,
        scenario.num_cache_tokens,
    )
    if total <= len(arrival.prompt) or arrival.pooling is not None:
        return []
    return model.lone_output(arrival.prompt, salt, arrival.rules, arrival.params.stop_token_ids, total)


def check_cached_content(kv: KVCacheManager, runner: HashRunner, looked_at: set[CachedBlock] | None = None) -> None:
    """I3: the cells of every findable block are the tokens its link names, at its place, under its salt.

    Only of blocks that are not in `looked_at`, if it is given; they are in it afterwards.
    """
    size, block_ids = kv.block_size, kv.pool.cached_blocks()
    if looked_at is not None:
        links = [link for link in map(kv.pool.link_of, block_ids) if link is not None and link not in looked_at]
        looked_at.update(links)
        block_ids = [link.block_id for link in links]
    if not block_ids:
        return
    places: dict[CachedBlock, tuple[int, int]] = {}
    num_digest_bytes = len(kv._hash_block(b"", b""))  # of the first group; others have one more
    expected = []
    for block_id in block_ids:
        link = kv.pool.link_of(block_id)
        assert link is not None
        first, salt = _place(link, size, places)
        group = link.digest[-1] if len(link.digest) > num_digest_bytes else 0
        expected.append((link.token_bytes, first, salt + group * GROUP_FACTOR))
    token_bytes, first, salts = zip(*expected, strict=True)
    token_ids, positions, salted = np.moveaxis(runner.cells(block_ids), 2, 0)  # [num_blocks, block_size] each
    assert (token_ids == np.frombuffer(b"".join(token_bytes), np.int32).reshape(-1, size)).all(), "I3: tokens"
    assert (positions == np.array(first)[:, None] + np.arange(size)).all(), "I3: positions"
    assert (salted == np.array(salts)[:, None]).all(), "I3: salt"


def _place(link: CachedBlock, size: int, known: dict[CachedBlock, tuple[int, int]]) -> tuple[int, int]:
    """(first position, number of the salt) of a block, by its chain. Chains have beginnings in common: see `known`."""
    chain: list[CachedBlock] = []
    end: CachedBlock | bytes = link
    while isinstance(end, CachedBlock) and end not in known:
        chain.append(end)
        end = end.parent
    first, salt = (-size, salt_number(end)) if isinstance(end, bytes) else known[end]
    for member in reversed(chain):
        first += size
        known[member] = first, salt
    return first, salt


def check_counters(before: Sequence[int], after: Sequence[int]) -> None:
    """I15: counts since the start never fall."""
    assert len(before) == len(after)
    assert not any(map(operator.lt, after, before)), f"I15: {before} became {after}"
