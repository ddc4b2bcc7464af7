"""What is left of a simulated world when nobody has anything to do: I4 nothing, and I15 figures that are true."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cb_backend.kv_cache.grouped_manager import GroupedKVCacheManager
from tests.simulation.checks import CheckedEngine
from tests.simulation.clients import FAILED, LENGTH, STOP, Answer
from tests.simulation.network import SimulatedClient, SimulatedLink
from tests.simulation.scenario import Scenario


def check_nothing_left(
    scenario: Scenario, checked: CheckedEngine, link: SimulatedLink, clients: Iterable[SimulatedClient]
) -> None:
    """I4, once the last launched step is back and the last cancel has been heard."""
    engine, kv, log, stats = checked.engine, checked.kv, checked.engine.log, checked.scheduler.stats()
    assert not engine.has_unfinished(), "I4: something is left"
    assert stats.num_free_blocks == stats.num_blocks == scenario.num_blocks - 1, "I4: blocks are lost"
    assert (stats.num_running, stats.num_waiting) == (0, 0), "I4: requests are left"
    assert stats.num_free_host_blocks == scenario.num_host_blocks, "I4: host blocks are lost"
    if engine.adapters is not None:
        engine.adapters.tidy(checked.scheduler.adapters_in_use, engine._clock())
        assert len(engine.adapters._kept) <= scenario.config.max_cpu_loras, "I4: adapters are kept for nobody"
        assert not checked.scheduler.adapters_in_use(), "I4: adapters are used by nobody"
    assert not any(front_end.open_request_ids for front_end in link.front_ends.values()), "I4: ids are left"
    assert not any(client._sinks for client in clients), "I4: sinks are left"
    assert not engine.is_holding, "I4: grammars are waited for"
    assert not checked.scheduler._swap._on_trust, "I4: a step that copies out is waited for"
    left = {**kv._chains, **kv._announced, **kv._coming}
    if isinstance(kv, GroupedKVCacheManager):
        left |= kv._windows | kv._promises._promised | kv._promises._owner
    assert not left, "I4: the cache remembers requests that have ended"
    awaited = {**log._open, **log._scheduled_at}
    assert not awaited, "I4: the log waits for requests that have ended"


def check_figures(checked: CheckedEngine, answers: Mapping[int, Answer]) -> None:
    """I15, of a world with one life, in which no fault has fired: the counts are what has happened."""
    stats, requests, counters = checked.scheduler.stats(), checked.requests, checked.counters
    started = [requests[request_id] for request_id in checked.last_row]
    assert stats.num_prompt_tokens == sum(request.num_prompt_tokens for request in started), "I15: prompt tokens"
    assert stats.num_preemptions == sum(request.num_preemptions for request in requests.values()), "I15: preemptions"
    assert stats.num_refused == counters["refused: queue full"], "I15: refusals"
    num_delivered = sum(len(answer.token_ids) for answer in answers.values())
    assert num_delivered <= stats.num_output_tokens, "I15: more tokens were delivered than counted"
    # Whoever is cut off, by a cancel, a timeout, his front end or a stop string, misses what is on its way.
    known = [answers[request_id] for request_id in requests]
    is_whole = all(answer.end in (STOP, LENGTH, FAILED) and not answer.arrival.params.stop for answer in known)
    assert not is_whole or num_delivered == stats.num_output_tokens, "I15: fewer tokens were delivered than counted"
    counters["worlds with exact figures"] += is_whole and bool(known)
