"""Runs one scenario on the real scheduler and KV manager with runner H, and checks the invariants after every action.

I1 blocks add up · I2 nothing is used after its free · I3 cached blocks hold what they claim and are not written ·
I4 idle is empty · I5 one final answer · I7 output equals the lone reference · I9 progress · I10 nobody overtakes but by
priority, and nobody is preempted too often · I11 a running request gets a token in every other step ·
I12 budget, no gap · I13 nothing is computed after a cancel · I16 salts do not mix (through H) ·
I17 a refusal leaves nothing behind · I18 what can never fit is refused, and only that.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import msgspec

from cb_backend.engine.admission import MAX_OVERTAKEN
from cb_backend.engine.preemption import MAX_PREEMPTIONS
from cb_backend.engine.scheduler import Scheduler
from cb_backend.errors import CbError, InvalidRequestError, UnavailableError
from cb_backend.kv_cache.manager import HashBlock, KVCacheManager
from cb_backend.outputs import NO_TOKEN, EngineOutput, SchedulerOutput
from cb_backend.request import FinishReason, Request, RequestStatus
from tests.fakes.runners import FakePending, HashModel, HashRunner
from tests.simulation.expectations import check_cached_content, is_due, lone_output, queue_place, refuses_by_queue
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
        self.scheduler = Scheduler(config, self.kv, scenario.max_model_len, scenario.num_host_blocks)
        self.scheduler._swap.fixed_cost_tokens = 0  # the requests of these worlds are short
        self.model = HashModel(scenario.vocab_size, scenario.stop_chance)
        self.runner = HashRunner(
            self.model,
            scenario.num_blocks,
            config.block_size,
            salts={arrival.request_id: arrival.salt for arrival in scenario.arrivals},
            fails_at={a.request_id: a.fails_at for a in scenario.arrivals if a.fails_at is not None},
            is_delayed=scenario.is_delayed,
            num_host_blocks=scenario.num_host_blocks,
        )
        self.in_flight: deque[tuple[SchedulerOutput, FakePending]] = deque()
        self.requests: dict[int, Request] = {}
        self.last_row: dict[int, int] = {}  # by request id: last plan with a row of it
        self.open: dict[int, Arrival] = {}  # accepted, neither ended nor cancelled
        self.ended: dict[int, FinishReason] = {}
        self.cancelled: set[int] = set()
        self.overtaken: Counter[int] = Counter()
        self.arrived_at: dict[int, float] = {}
        self.num_arrived: dict[int, int] = {}
        self.now = 0.0
        self.outputs: dict[int, list[int]] = {}
        self.order = {arrival.request_id: index for index, arrival in enumerate(scenario.arrivals)}
        self.slot_owner: dict[int, int] = {}
        self.computed: dict[int, int] = {}  # by request id: next position to compute

    def run(self) -> Counter[str]:
        arrivals = deque(self.scenario.arrivals)
        now, idle_rounds = 0, 0
        while arrivals or self.open or self.in_flight:
            self.now = now * self.scenario.step_s
            self.scheduler.set_time(self.now)
            self._expire()
            while arrivals and arrivals[0].at_step <= now:
                self._arrive(arrivals.popleft(), now)
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
                check_cached_content(self.kv, self.runner)
            now += 1
        self._check_end()
        return self.counters

    def _progress(self) -> int:
        """Grows when a token is computed or delivered, or a request ends."""
        num_delivered = sum(map(len, self.outputs.values()))
        return sum(self.runner.num_computed.values()) + num_delivered + len(self.ended)

    # ---- what happens -----------------------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival, now: int) -> None:
        limit = min(self.scenario.max_model_len, self.scenario.num_cache_tokens)
        is_too_long = len(arrival.prompt) + 1 > limit
        is_queue_full, full_figure = refuses_by_queue(
            self.scenario.config, self.scheduler, self.kv, len(arrival.prompt)
        )
        before = self.scheduler.stats()
        expected = InvalidRequestError if is_too_long else UnavailableError if is_queue_full else None
        refusal: CbError | None = None
        try:
            request = arrival.make_request(self.scenario.max_model_len)
            self.scheduler.add_request(request)
        except (InvalidRequestError, UnavailableError) as error:
            refusal = error
        assert (refusal and type(refusal)) == expected, f"I18: {refusal!r}, expected {expected}"
        if refusal is None:
            self.open[arrival.request_id] = arrival
            self.requests[arrival.request_id] = request
            self.arrived_at[arrival.request_id] = self.now
            self.num_arrived[arrival.request_id] = len(self.num_arrived)
            self.outputs[arrival.request_id] = []
            return
        self.counters["refused: too long" if is_too_long else "refused: queue full"] += 1
        figure = len(arrival.prompt) if is_too_long else full_figure
        assert str(figure) in str(refusal), "a refusal names the figures"
        after = msgspec.structs.replace(self.scheduler.stats(), num_refused=before.num_refused)
        assert after == before, "I17: a refusal left something behind"
        self.scheduler.check_integrity()

    def _cancel(self, request_id: int) -> None:
        was_waiting = request_id in self.scheduler._queue
        known = self.scheduler.cancel(request_id)
        assert known == (request_id in self.open), "cancel answers wrongly"
        assert not self.scheduler.cancel(request_id), "the second cancel does nothing"
        if known:
            self.counters["cancelled: waiting" if was_waiting else "cancelled: running"] += 1
            del self.open[request_id]
            self.cancelled.add(request_id)
        self.scheduler.check_integrity()

    def _expire(self) -> None:
        """Exactly those end whose timeout has passed."""
        due = {
            request_id
            for request_id in self.open
            if is_due(
                self.scenario.config, self.requests[request_id], self.arrived_at[request_id], self.now,
                has_started=request_id in self.last_row,
            )
        }  # fmt: skip
        expired = dict(self.scheduler.expire())
        assert expired.keys() == due, f"timeouts: {expired}, expected {due}"
        for request_id, reason in expired.items():
            assert "timed out after" in reason, "a timeout names its limit"
            self.counters["timed out: running" if request_id in self.computed else "timed out: waiting"] += 1
            del self.open[request_id]
            self.cancelled.add(request_id)
            assert not self.scheduler.cancel(request_id), "a request that has timed out is gone"
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
            has_classes = len({arrival.scheduling.priority for arrival in self.scenario.arrivals}) > 1
            is_short = num_free < plan.num_decode_rows + victims
            assert victims == 0 or has_classes or is_short, "preempted without need"
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
        waiting = [self._place(request.request_id) for request in self.scheduler._queue]
        assert waiting == sorted(waiting), "I10: the queue is out of order"
        most = max((request.num_preemptions for request in self.requests.values()), default=0)
        assert most <= MAX_PREEMPTIONS, "I10: preempted too often"
        for row in plan.joined:
            if row.request_id in self.computed:
                self.counters["resumed"] += 1
            self.slot_owner[row.slot] = row.request_id
            self.computed.pop(row.request_id, None)
            self._check_overtaking(row.request_id)
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
            self.last_row[request_id] = plan.step_id
        for block_id in pending.written_blocks:
            assert self.kv.pool.ref_cnt(block_id) == 1, "I3: a shared block is written"
            assert self.kv.pool.link_of(block_id) is None, "I3: a cached block is written"
        self.counters["swapped out blocks"] += len(plan.swap_out)
        self.counters["swapped in blocks"] += len(plan.swap_in)
        self._check_decode_share(plan)
        self.counters["tokens"] += plan.num_tokens
        self.counters["whole prompts beyond the budget"] += plan.num_tokens > config.max_num_batched_tokens
        self.counters["chunks"] += int((~plan.is_sampling).sum())

    def _place(self, request_id: int) -> tuple[float, ...]:
        priority = self.requests[request_id].scheduling.priority
        return queue_place(self.scenario.config, priority, self.arrived_at[request_id], self.num_arrived[request_id])

    def _check_overtaking(self, request_id: int) -> None:
        """I10: who starts before his place has passed nobody more urgent, and nobody too often."""
        place, priority = self._place(request_id), self.requests[request_id].scheduling.priority
        for passed in self.scheduler._queue:
            if self._place(passed.request_id) < place:
                self.overtaken[passed.request_id] += 1
                self.counters["overtaken"] += 1
                assert passed.scheduling.priority >= priority, "I10: overtaken by a less urgent request"
                assert passed.num_preemptions == 0, "O10: overtaken after a preemption"
                assert self.overtaken[passed.request_id] <= MAX_OVERTAKEN, "I10: overtaken too often"

    def _check_decode_share(self, plan: SchedulerOutput) -> None:
        """I11: who is past his prefill has a row in every plan (every other without chunks), or waits for a block."""
        most_gap = 0 if self.scenario.config.enable_chunked_prefill else 1
        for request_id in self.open:
            request = self.requests[request_id]
            if request.status is not RequestStatus.RUNNING or self.last_row[request_id] >= plan.step_id - most_gap:
                continue
            table, slot = self.scheduler._table, request.slot
            computed = self.computed[request_id]
            is_decoding = table.num_prefill_tokens[slot] <= computed < table.max_computed_tokens[slot]
            if is_decoding:
                assert computed == len(request.block_table) * self.scenario.config.block_size, "I11: left out"
                assert self.last_row[request_id] >= plan.step_id - 2 - self.scenario.run_ahead, "I11: a long wait"
                self.counters["waits for a block"] += 1

    def _check_output(self, arrival: Arrival, reason: FinishReason) -> None:
        """I7: equal to the lone run; a failing request ends exactly where it fails."""
        expected = lone_output(self.scenario, self.model, arrival)
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

    def _check_end(self) -> None:
        stats = self.scheduler.stats()
        assert not self.scheduler.has_unfinished(), "I4: something is left"
        assert stats.num_free_blocks == stats.num_blocks == self.scenario.num_blocks - 1, "I4: blocks are lost"
        assert (stats.num_running, stats.num_waiting) == (0, 0), "I4: requests are left"
        assert stats.num_free_host_blocks == self.scenario.num_host_blocks, "I4: host blocks are lost"
        for request_id in self.cancelled:
            output = self.outputs[request_id]
            expected = lone_output(self.scenario, self.model, self.scenario.arrivals[self.order[request_id]])
            assert output == expected[: len(output)], "I7: a cancelled request's tokens differ from the lone run"
        assert stats.num_output_tokens == sum(map(len, self.outputs.values())), "I15: output tokens"
        self.scheduler.check_integrity()
        check_cached_content(self.kv, self.runner)
        self.counters["preemptions"] += stats.num_preemptions
        self.counters["evicted blocks"] += stats.num_evicted_blocks
        self.counters["prefix hit tokens"] += stats.num_cached_prompt_tokens
        self.counters["requests"] += len(self.outputs)
