"""What goes into a simulated engine and comes out of it, call by call; it is compared with what the documents say.

I2 nothing is used after its free · I9 nobody is preempted without need · I17, I18 refusals. What must be so for every
plan is in `plan_checks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from cb_backend.contracts.errors import CbError, InvalidRequestError, UnavailableError
from cb_backend.contracts.request import Request
from cb_backend.contracts.step import EngineOutput, MaskSource, Pending, StepPlan, StepResult
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.scheduler.admission import LOOKAHEAD
from tests.fakes.plan_follower import FakePending
from tests.fakes.runners import HashRunner
from tests.simulation.adapter_turns import TurnChecks, waits_for_slot
from tests.simulation.adapters import AdapterChecks, RoomChecks
from tests.simulation.clients import Answer
from tests.simulation.expectations import queue_place, refuses_by_queue
from tests.simulation.plan_checks import check_plan
from tests.simulation.ranks import TwoRanks
from tests.simulation.scenario import STEP_TRAITS, Scenario


class CheckedEngine:
    """Stands around one life of an engine and looks at what goes in and out. Its `violation` is the first one found.

    Violations are kept rather than raised: the engine's own loop would take them for a failed step.
    """

    def __init__(
        self,
        scenario: Scenario,
        engine: LLMEngine,
        runner: HashRunner,
        answers: dict[int, Answer],
        counters: Counter[str],
    ) -> None:
        self.scenario, self.config = scenario, scenario.config
        self.engine, self.runner = engine, runner
        self.scheduler, self.kv = engine.scheduler, engine.scheduler._kv
        self.answers = answers
        self.counters = counters
        self.violation: BaseException | None = None
        self.num_calls = 0  # that may have changed something: none while nothing happens
        self.requests: dict[int, Request] = {}
        self.last_row: dict[int, int] = {}  # by request id: last plan with a row of it
        self.computed: dict[int, int] = {}  # by request id: next position to compute
        self.slot_owner: dict[int, int] = {}
        self.overtaken: Counter[int] = Counter()
        # Ids of those who may be passed before the last plan: the first of the queue; who waited for an adapter's slot.
        self.first: set[int] = set()
        self.waited_for_slot: set[int] = set()
        self.arrived_at: dict[int, float] = {}
        self.places: dict[int, tuple[float, ...]] = {}  # in the queue, by request id
        self.in_flight: dict[int, FakePending] = {}  # launched, not read; by step id
        self.planned: StepPlan | None = None  # and not handed to the runner
        self.plans: dict[int, StepPlan] = {}  # by step id
        self.adapters = AdapterChecks(scenario.num_adapter_slots, counters)
        if engine.adapters is not None:
            RoomChecks(engine.adapters, self._expect, counters)
        self.was_short = False  # in the last plan somebody found no blocks, whatever was reserved
        self.has_classes = len({arrival.scheduling.priority for arrival in scenario.arrivals}) > 1
        self.has_tenants = len({arrival.scheduling.tenant for arrival in scenario.arrivals}) > 1
        if scenario.num_adapter_slots:
            TurnChecks(self.scheduler, self.places, self.has_tenants, counters)
        self._add_request, self._schedule = self.scheduler.add_request, self.scheduler.schedule
        self._fail_step = self.scheduler.fail_step
        self.scheduler.fail_step = self.fail_step  # type: ignore[method-assign]
        policy = self.scheduler._admission._policy
        self._may_admit = policy.may_admit
        policy.may_admit = self.may_admit  # type: ignore[method-assign]
        self._allocate, self._is_prefix_coming = self.kv.allocate_slots, self.kv.is_prefix_coming
        self.kv.allocate_slots = self.allocate_slots  # type: ignore[method-assign]
        self.kv.is_prefix_coming = self.is_prefix_coming  # type: ignore[method-assign]
        self.scheduler.add_request = self.add_request  # type: ignore[method-assign]
        self.scheduler.schedule = self.schedule  # type: ignore[method-assign]
        engine.runner = self  # type: ignore[assignment]

    def is_held(self, request_id: int) -> bool:
        """Whether the request's grammar is being compiled."""
        return request_id in self.engine._held

    def traits_of_step(self, point: str) -> set[str]:
        """What is true (of `STEP_TRAITS`) of the step that has come to this fault point.

        A step is relied on where a later one, launched already, brings in what it copies out; it has lost a row where
        a request has left since it was planned.
        """
        steps = self.scheduler._in_flight._steps
        step = steps[-1 if point == "engine.execute" else 0]
        plan, epoch = self.plans[step.step_id], self.scheduler._table.epoch
        copied = {host for _, host in plan.copies.out}
        later = [self.plans[other.step_id] for other in steps if other.step_id > step.step_id]
        is_true = (
            bool(copied),
            bool(plan.copies.back),
            any(host in copied for other in later for _, host in other.copies.back),
            bool((epoch[step.rows.slots] != step.rows.epochs).any()),
        )
        return {trait for trait, is_so in zip(STEP_TRAITS, is_true, strict=True) if is_so}

    # ---- the engine's calls go through here ---------------------------------------------------------------------

    def add_request(self, request: Request, is_held: bool = False) -> None:
        self.num_calls += 1
        limit = min(self.scenario.max_model_len, self.scenario.num_cache_tokens)
        is_too_long = request.num_prompt_tokens + (not request.is_pooling) > limit
        is_full, figure = refuses_by_queue(self.config, self.scheduler, self.kv, request.num_prompt_tokens)
        expected = InvalidRequestError if is_too_long else UnavailableError if is_full else None
        before, refusal = self.scheduler.stats(), None
        try:
            self._add_request(request, is_held)
        except CbError as error:
            refusal = error
        self._expect((refusal and type(refusal)) == expected, f"I18: {refusal!r}, expected {expected}")
        if refusal is None:
            self.requests[request.request_id] = request
            now, priority = self.scheduler._now, request.scheduling.priority
            self.arrived_at[request.request_id] = now
            self.places[request.request_id] = queue_place(self.config, priority, now, len(self.places))
            return
        self.counters["refused: too long" if is_too_long else "refused: queue full"] += 1
        figure = request.num_prompt_tokens if is_too_long else figure
        self._expect(str(figure) in str(refusal), "a refusal names the figures")
        self._expect(is_too_long or "try again in about" in str(refusal), "a refusal says when to come back")
        after = msgspec.structs.replace(self.scheduler.stats(), num_refused=before.num_refused)
        self._expect(after == before, "I17: a refusal left something behind")
        raise refusal

    def schedule(self) -> StepPlan | None:
        if self.planned is not None:
            self.adapters.lost(self.planned)
            self.runner.lose(self.planned)
            self.planned = None
        num_free, preempted = self.kv.num_free_blocks, self.scheduler.num_preemptions
        self.was_short = False
        queue = self.scheduler._queue
        self.first = {request.request_id for request in queue.first(LOOKAHEAD)}
        self.waited_for_slot = {each.request_id for each in queue if waits_for_slot(self.scheduler, each)}
        plan = self._schedule()
        self.num_calls += plan is not None
        if plan is None:
            self.counters["stalled"] += self.scheduler.has_unfinished()
            return None
        victims = self.scheduler.num_preemptions - preempted
        is_short = num_free < (plan.num_decode_rows + victims) * self.kv.num_groups
        self._expect(victims == 0 or self.has_classes or is_short, "preempted without need")
        self.counters["full"] += self.was_short or (victims > 0 and is_short)
        self.planned = self.plans[plan.step_id] = plan
        return plan

    def fail_step(self, step_id: int) -> EngineOutput:
        """The engine has given up a step; one that was launched, and that nobody has read, is lost."""
        self.num_calls += 1
        if step_id in self.in_flight:
            self.adapters.lost(self.plans[step_id])
            self.in_flight.pop(step_id).lose()
        return self._fail_step(step_id)

    def allocate_slots(
        self, request: Request, num_tokens: int, found: Sequence[int] = (), num_reserved: int = 0, num_computed: int = 0
    ) -> list[int] | None:
        self.num_calls += 1
        num_needed = self.kv.num_blocks_for(num_tokens) - sum(self.kv.pool.ref_cnt(block) > 0 for block in found)
        self.was_short |= num_needed > self.kv.num_free_blocks
        return self._allocate(request, num_tokens, found, num_reserved, num_computed)

    def may_admit(self, head: Request) -> bool:
        may_start = self._may_admit(head)
        self.counters["held back by a share"] += not may_start and self.config.reserved_share > 0
        return may_start

    def is_prefix_coming(self, request: Request) -> bool:
        is_coming = self._is_prefix_coming(request)
        self.counters["waits for a prefix"] += is_coming
        return is_coming

    def execute(self, plan: StepPlan, masks: MaskSource) -> Pending:
        self.planned = None
        try:
            pending = self.runner.execute(plan, masks)
            check_plan(self, plan, pending)
        except AssertionError as error:
            self.violation = self.violation or error
            raise
        self.in_flight[plan.step_id] = pending
        return _Checked(self, pending)

    def read(self, pending: FakePending) -> None:
        """The result of a step is asked for; of one with guides perhaps before those of the steps before it."""
        self.num_calls += 1
        step_id = next(step_id for step_id, other in self.in_flight.items() if other is pending)
        del self.in_flight[step_id]
        for other in self.in_flight.values():
            is_held = self.are_held(other.written_blocks) and self.are_held(other.read_blocks)
            self._expect(is_held, "I2: freed while a launched step writes or reads it")

    def are_held(self, block_ids: Iterable[int]) -> bool:
        return all(map(self.kv.pool._ref_cnt.__getitem__, block_ids))  # none is negative: the pool's own check

    def check_reads(self, step_id: int) -> None:
        """I2: whoever still waits for something of the step has read nothing but what is his own."""
        ranks = self.runner if isinstance(self.runner, TwoRanks) else None
        if ranks is None and step_id not in self.runner.misread:
            return
        step = next(step for step in self.scheduler._in_flight._steps if step.step_id == step_id)
        is_live = self.scheduler._table.epoch[step.rows.slots] == step.rows.epochs
        live = set(step.rows.request_ids[is_live].tolist())
        misread = self.runner.misread.get(step_id, set()) & live
        assert not misread, f"I2: {misread} read what is not their own"
        if ranks is not None:
            ranks.check_ranks(step_id, live)

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        return b""

    def close(self) -> None:
        self.runner.close()

    def _expect(self, condition: bool, what: str) -> None:
        if not condition:
            self.violation = self.violation or AssertionError(what)


class _Checked:
    """A launched step whose result is looked at when it is read."""

    def __init__(self, checked: CheckedEngine, pending: FakePending) -> None:
        self._checked, self._pending = checked, pending

    def result(self) -> StepResult:
        self._checked.read(self._pending)
        try:
            result = self._pending.result()
            self._checked.check_reads(result.step_id)
            return result
        except AssertionError as error:
            self._checked.violation = self._checked.violation or error
            raise
