"""Runs one scenario on the real scheduler and KV manager with runner H, and checks the invariants after every action.

I1 blocks add up · I2 nothing is used after its free · I3 cached blocks hold what they claim and are not written ·
I4 idle is empty · I5 one final answer · I7 output equals the lone reference · I9 progress · I10 order of arrival ·
I12 budget, no gap · I13 nothing is computed after a cancel · I16 salts do not mix (through H) ·
I17 a refusal leaves nothing behind · I18 what can never fit is refused, and only that.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np

from cb_backend.engine.scheduler import Scheduler
from cb_backend.errors import CbError, InvalidRequestError, UnavailableError
from cb_backend.kv_cache.block_pool import CachedBlock
from cb_backend.kv_cache.manager import HashBlock, KVCacheManager
from cb_backend.outputs import NO_TOKEN, EngineOutput, SchedulerOutput
from cb_backend.request import FinishReason
from tests.fakes.runners import FakePending, HashModel, HashRunner, salt_number
from tests.simulation.scenario import Arrival, Scenario

MAX_IDLE_ROUNDS = 3


class World:
    """One engine and its clients. `run()` raises `AssertionError` at the first broken invariant."""

    def __init__(self, scenario: Scenario, hash_block: HashBlock | None = None) -> None:
        config = scenario.config
        self.scenario = scenario
        self.counters: Counter[str] = Counter()
        self.rng = random.Random(scenario.seed + 1)
        self.kv = KVCacheManager(scenario.num_blocks, config.block_size, config.enable_prefix_caching, hash_block)
        self.scheduler = Scheduler(config, self.kv, scenario.max_model_len)
        self.model = HashModel(scenario.vocab_size, scenario.stop_chance)
        self.runner = HashRunner(
            self.model,
            scenario.num_blocks,
            config.block_size,
            salts={arrival.request_id: arrival.salt for arrival in scenario.arrivals},
            fails_at={a.request_id: a.fails_at for a in scenario.arrivals if a.fails_at is not None},
            is_delayed=scenario.is_delayed,
        )
        self.in_flight: deque[tuple[SchedulerOutput, FakePending]] = deque()
        self.open: dict[int, Arrival] = {}  # accepted, neither ended nor cancelled
        self.ended: dict[int, FinishReason] = {}
        self.cancelled: set[int] = set()
        self.outputs: dict[int, list[int]] = {}
        self.order = {arrival.request_id: index for index, arrival in enumerate(scenario.arrivals)}
        self.slot_owner: dict[int, int] = {}
        self.computed: dict[int, int] = {}  # by request id: next position to compute

    def run(self) -> Counter[str]:
        arrivals = deque(self.scenario.arrivals)
        now, idle_rounds = 0, 0
        while arrivals or self.open or self.in_flight:
            while arrivals and arrivals[0].at_step <= now:
                self._arrive(arrivals.popleft())
            for arrival in self.scenario.arrivals:
                if arrival.cancel_at == now:
                    self._cancel(arrival.request_id)
            before = self._progress()
            self._launch()
            self.scheduler.check_integrity()
            self._finish_oldest()
            idle_rounds = 0 if self._progress() > before or not self.open else idle_rounds + 1
            # Results of rows that were cancelled or preempted meanwhile may have to come back first.
            assert idle_rounds <= MAX_IDLE_ROUNDS + self.scenario.run_ahead, "I9: no progress"
            if now % 16 == 0:
                self._check_cached_content()
            now += 1
        self._check_end()
        return self.counters

    def _progress(self) -> int:
        """Grows when a token is computed or delivered, or a request ends."""
        num_delivered = sum(map(len, self.outputs.values()))
        return sum(self.runner.num_computed.values()) + num_delivered + len(self.ended)

    # ---- what happens -----------------------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival) -> None:
        limit = min(self.scenario.max_model_len, self.scenario.num_cache_tokens)
        is_too_long = len(arrival.prompt) + 1 > limit
        is_queue_full = self.scheduler.num_waiting >= self.scenario.config.max_queue_size
        before = self.scheduler.stats()
        expected = InvalidRequestError if is_too_long else UnavailableError if is_queue_full else None
        refusal: CbError | None = None
        try:
            self.scheduler.add_request(arrival.make_request(self.scenario.max_model_len))
        except (InvalidRequestError, UnavailableError) as error:
            refusal = error
        assert (refusal and type(refusal)) == expected, f"I18: {refusal!r}, expected {expected}"
        if refusal is None:
            self.open[arrival.request_id] = arrival
            self.outputs[arrival.request_id] = []
            return
        self.counters["refused: too long" if is_too_long else "refused: queue full"] += 1
        figure = len(arrival.prompt) if is_too_long else self.scenario.config.max_queue_size
        assert str(figure) in str(refusal), "a refusal names the figures"
        assert self.scheduler.stats() == before, "I17: a refusal left something behind"
        self.scheduler.check_integrity()

    def _cancel(self, request_id: int) -> None:
        was_waiting = request_id in self.scheduler._waiting
        known = self.scheduler.cancel(request_id)
        assert known == (request_id in self.open), "cancel answers wrongly"
        assert not self.scheduler.cancel(request_id), "the second cancel does nothing"
        if known:
            self.counters["cancelled: waiting" if was_waiting else "cancelled: running"] += 1
            del self.open[request_id]
            self.cancelled.add(request_id)
        self.scheduler.check_integrity()

    def _launch(self) -> None:
        """Launch some steps, up to the run-ahead depth."""
        depth = 1 if self.rng.random() < 0.1 else 1 + self.scenario.run_ahead
        while len(self.in_flight) < depth:
            num_free = self.kv.num_free_blocks
            preempted = self.scheduler.stats().num_preemptions
            plan = self.scheduler.schedule()
            if plan is None:
                assert self.in_flight or not self.open, "I9: nothing to compute, nothing to wait for"
                self.counters["stalled"] += bool(self.open)
                break
            victims = self.scheduler.stats().num_preemptions - preempted
            assert victims == 0 or num_free < plan.num_decode_rows + victims, "preempted without need"
            pending = self.runner.execute_model(plan)
            self._check_plan(plan, pending)
            self.in_flight.append((plan, pending))

    def _finish_oldest(self) -> None:
        if not self.in_flight:
            return
        _, pending = self.in_flight.popleft()
        output = self.scheduler.update_from_output(pending.result())
        self._take_output(output)
        for _, later in self.in_flight:
            assert all(self.kv.pool.ref_cnt(block) > 0 for block in later.written_blocks), "I2: freed while written"
        self.counters["deferred frees"] += bool(self.scheduler._in_flight.deferred_blocks)

    def _take_output(self, output: EngineOutput) -> None:
        rows = zip(output.request_ids.tolist(), output.token_ids.tolist(), output.finish_reasons.tolist(), strict=True)
        for request_id, token_id, reason in rows:
            assert request_id in self.open, "I5: output for a request that has ended, was cancelled or is unknown"
            if token_id != NO_TOKEN:
                self.outputs[request_id].append(token_id)
            if reason:
                self.ended[request_id] = FinishReason(reason)
                self._check_output(self.open.pop(request_id), FinishReason(reason))
        for request_id, num_cached in output.num_cached_tokens.items():
            assert len(self.outputs[request_id]) == 1, "cached tokens are told with the first token"
            assert 0 <= num_cached < len(self.scenario.arrivals[self.order[request_id]].prompt), "M6"

    # ---- what must hold ---------------------------------------------------------------------------------------------

    def _check_plan(self, plan: SchedulerOutput, pending: FakePending) -> None:
        config = self.scenario.config
        is_lone_prompt = not config.enable_chunked_prefill and plan.num_rows == 1
        assert plan.num_tokens <= config.max_num_batched_tokens or is_lone_prompt, "I12: over the budget"
        assert plan.num_rows <= config.max_num_seqs, "I12: more rows than max_num_seqs"
        assert (plan.num_scheduled_tokens >= 1).all(), "I12: an empty row"
        waiting = [self.order[request_id] for request_id in self.scheduler._waiting]
        assert waiting == sorted(waiting), "I10: the queue is out of order"
        for row in plan.joined:
            if row.request_id in self.computed:
                self.counters["resumed"] += 1
            self.slot_owner[row.slot] = row.request_id
            self.computed.pop(row.request_id, None)
            assert self.order[row.request_id] < min(waiting, default=len(self.order)), "I10: overtaken"
            known = [*self.scenario.arrivals[self.order[row.request_id]].prompt, *self.outputs[row.request_id]]
            assert row.token_ids.tolist() == known, "the tokens of a joining row are wrong"
        rows = zip(
            plan.slots.tolist(), plan.num_computed_tokens.tolist(), plan.num_scheduled_tokens.tolist(), strict=True
        )
        for slot, computed, scheduled in rows:
            request_id = self.slot_owner[slot]
            assert request_id in self.open, "I13: computes for a request that has ended"
            assert self.computed.get(request_id, computed) == computed, "I12: a gap in the positions"
            self.computed[request_id] = computed + scheduled
        for block_id in pending.written_blocks:
            assert self.kv.pool.ref_cnt(block_id) == 1, "I3: a shared block is written"
            assert self.kv.pool.link_of(block_id) is None, "I3: a cached block is written"
        self.counters["tokens"] += plan.num_tokens
        self.counters["whole prompts beyond the budget"] += plan.num_tokens > config.max_num_batched_tokens
        self.counters["chunks"] += int((~plan.is_sampling).sum())

    def _check_output(self, arrival: Arrival, reason: FinishReason) -> None:
        """I7: equal to the lone run; a failing request ends exactly where it fails."""
        expected = self._lone_output(arrival)
        fails_after = None if arrival.fails_at is None else max(0, arrival.fails_at - len(arrival.prompt))
        if fails_after is not None and fails_after < len(expected):
            assert reason == FinishReason.ERROR, "a failed row did not end its request"
            expected = expected[:fails_after]
            self.counters["failed"] += 1
        else:
            stops = expected[-1] in arrival.params.stop_token_ids and len(expected) >= arrival.params.min_tokens
            assert reason == (FinishReason.STOP if stops else FinishReason.LENGTH), f"I5: ended with {reason.name}"
            self.counters[f"ended: {reason.name.lower()}"] += 1
        assert self.outputs[arrival.request_id] == expected, "I7: differs from the lone run"

    def _lone_output(self, arrival: Arrival) -> list[int]:
        total = min(
            len(arrival.prompt) + arrival.params.max_tokens,
            self.scenario.max_model_len,
            self.scenario.num_cache_tokens,
        )
        return self.model.lone_output(
            arrival.prompt, arrival.salt, arrival.params, arrival.params.stop_token_ids, total
        )

    def _check_cached_content(self) -> None:
        """I3: the cells of every findable block are the tokens its link names, at its place, under its salt."""
        size = self.scenario.config.block_size
        for block_id in range(1, self.scenario.num_blocks):
            link = self.kv.pool.link_of(block_id)
            if link is None:
                continue
            cells = self.runner.cells[block_id]
            depth, root = 0, link.parent
            while isinstance(root, CachedBlock):
                depth, root = depth + 1, root.parent
            assert cells[:, 0].tolist() == np.frombuffer(link.token_bytes, np.int32).tolist(), "I3: tokens"
            assert cells[:, 1].tolist() == list(range(depth * size, (depth + 1) * size)), "I3: positions"
            assert (cells[:, 2] == salt_number(root)).all(), "I3: salt"

    def _check_end(self) -> None:
        stats = self.scheduler.stats()
        assert not self.scheduler.has_unfinished(), "I4: something is left"
        assert stats.num_free_blocks == stats.num_blocks == self.scenario.num_blocks - 1, "I4: blocks are lost"
        assert (stats.num_running, stats.num_waiting) == (0, 0), "I4: requests are left"
        for request_id in self.cancelled:
            output = self.outputs[request_id]
            expected = self._lone_output(self.scenario.arrivals[self.order[request_id]])
            assert output == expected[: len(output)], "I7: a cancelled request's tokens differ from the lone run"
        assert stats.num_output_tokens == sum(map(len, self.outputs.values())), "I15: output tokens"
        self.scheduler.check_integrity()
        self._check_cached_content()
        self.counters["preemptions"] += stats.num_preemptions
        self.counters["evicted blocks"] += stats.num_evicted_blocks
        self.counters["prefix hit tokens"] += stats.num_cached_prompt_tokens
        self.counters["requests"] += len(self.outputs)
