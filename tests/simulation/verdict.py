"""What must hold of a simulated world after each turn of its engine, and when everybody has his answer.

After every turn: I1 blocks add up · I3 cached blocks hold what they claim · I15 counters · deadlines are kept. At the
end: I4 idle is empty · I5 to I8 every client's history (`clients`) · I14 nothing fails for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cb_backend.kv_cache.block_pool import CachedBlock
from tests.simulation.adapters import may_be_refused as may_refuse_adapter
from tests.simulation.clients import FAILED, INTERNAL, REFUSED, UNAVAILABLE, Answer
from tests.simulation.expectations import check_cached_content, check_counters, is_due
from tests.simulation.grammars import may_be_refused
from tests.simulation.idle import check_figures, check_nothing_left
from tests.simulation.life import Life
from tests.simulation.network import SimulatedClient
from tests.simulation.scenario import Scenario

QUIET_TURNS_UNCHECKED = 8  # where nothing happens, as while a grammar is compiled, every so many turns are checked


class Verdict:
    """Raises `AssertionError` at what is broken. `begin_life` says which engine process it is about from now on."""

    def __init__(
        self, scenario: Scenario, answers: dict[int, Answer], counters: Counter[str], fired: Counter[str]
    ) -> None:
        self.scenario, self.answers, self.counters = scenario, answers, counters
        self.fired = fired  # by fault point
        limits = (scenario.config, *(arrival.scheduling for arrival in scenario.arrivals))
        self.has_deadlines = any(limit.timeout_ms or limit.queue_timeout_ms for limit in limits)

    def begin_life(self, life: Life) -> None:
        self.life = life
        self.counts: tuple[int, ...] = ()
        self.state: tuple[object, ...] = ()  # as it was checked last
        self.num_quiet_turns = 0
        self.looked_at: set[CachedBlock] = set()  # cached blocks whose content was right; no plan writes such a block

    def due(self, now: float) -> set[int]:
        """Requests whose timeout has passed, and that the engine must end in its next turn."""
        if not self.has_deadlines or not self.life.process.engine.has_unfinished():
            return set()
        engine, config = self.life.engine, self.scenario.config
        known = [rid for rid, answer in self.answers.items() if answer.end is None and rid in engine.requests]
        return {
            rid for rid in known
            if is_due(config, engine.requests[rid], engine.arrived_at[rid], now, rid in engine.last_row)
        }  # fmt: skip

    def check_turn(self, due: set[int], num_frames: int) -> None:
        """`num_frames`: that were on their way to the engine before the turn."""
        engine = self.life.engine
        stats = engine.scheduler.stats()
        state = (stats, engine.num_calls, len(engine.engine._held))
        is_quiet = num_frames == 0 and state == self.state
        self.num_quiet_turns = self.num_quiet_turns + 1 if is_quiet else 0
        if self.num_quiet_turns % QUIET_TURNS_UNCHECKED == 0:
            engine.scheduler.check_integrity()
        self.state = state
        counts = (
            stats.num_preemptions, stats.num_prompt_tokens, stats.num_cached_prompt_tokens, stats.num_output_tokens,
            stats.num_cancelled, stats.num_evicted_blocks, stats.num_refused, stats.num_timed_out,
            stats.num_reset_blocks, stats.num_swapped_out, stats.num_swapped_in,
        )  # fmt: skip
        check_counters(self.counts or counts, counts)
        self.counts = counts
        if self.fired["front_end.deliver"]:
            return
        for request_id in due:
            answer = self.answers[request_id]
            assert not answer.is_open, "a request was not ended though its time is over"
            if answer.end == UNAVAILABLE:
                assert "timed out after" in answer.message, f"a timeout says {answer.message!r}"
                has_started = request_id in engine.last_row
                self.counters["timed out: running" if has_started else "timed out: waiting"] += 1
        for request_id, answer in self.answers.items():
            if answer.end == UNAVAILABLE and not answer.has_timed_out and "timed out after" in answer.message:
                assert request_id in due, "timed out too early"
                answer.has_timed_out = True

    def check_cache(self, turn: int) -> None:
        if self.num_quiet_turns % QUIET_TURNS_UNCHECKED == 0:
            check_cached_content(self.life.engine.kv, self.life.runner, self.looked_at if turn % 16 else None)

    def check_end(self, clients: Sequence[SimulatedClient], is_first_life: bool) -> None:
        check_nothing_left(self.scenario, self.life.engine, self.life.link, clients)
        if is_first_life and not self.fired:
            check_figures(self.life.engine, self.answers)
        self.life.engine.scheduler.check_integrity()
        check_cached_content(self.life.engine.kv, self.life.runner)
        has_step_failed = bool(self.fired["engine.execute"] + self.fired["engine.result"])
        for answer in self.answers.values():
            answer.check(may_fail=has_step_failed)
            assert answer.end != FAILED or has_step_failed or answer.arrival.fails_at is not None, "failed for nothing"
            assert answer.end != INTERNAL or self.fired, "I14: an internal error for nothing"
            is_refused_grammar = answer.end == REFUSED and "structured output" in answer.message
            grammar = answer.arrival.params.structured_output
            assert not is_refused_grammar or may_be_refused(grammar, self.scenario.step_s), "a good grammar is refused"
            self.counters["refused: grammar"] += is_refused_grammar
            is_refused_adapter = answer.end in (REFUSED, UNAVAILABLE) and "adapter 'name" in answer.message
            may_refuse = may_refuse_adapter(answer.arrival, self.scenario.step_s)
            assert not is_refused_adapter or may_refuse, "a good adapter is refused"
            self.counters["refused: adapter"] += is_refused_adapter
            self.counters[f"ended: {answer.end}"] += 1
            self.counters["failed rows"] += answer.end == FAILED and not has_step_failed
        self.counters["requests"] += sum(answer.end != REFUSED for answer in self.answers.values())
        self.count_life()

    def count_life(self) -> None:
        stats = self.life.engine.scheduler.stats()
        self.counters["preemptions"] += stats.num_preemptions
        self.counters["swap ins"] += stats.num_swapped_in
        self.counters["evicted blocks"] += stats.num_evicted_blocks
        self.counters["prefix hit tokens"] += stats.num_cached_prompt_tokens
