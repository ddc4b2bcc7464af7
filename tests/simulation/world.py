"""Runs one scenario on the real engine loop, scheduler, block manager and front-end protocol, under a virtual clock.

Made up are only the model (runner H: `tests.fakes.runners`), the network (`network`) and what the clients do. After
every turn: I1 blocks add up · I3 cached blocks hold what they claim · I15 counters. At the end: I4 idle is empty ·
I5 to I8 every client's history (`clients`) · I19 a goodbye ends the process · I20 after a crash a new life serves.
What must be so in every plan is in `checks`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from contextlib import nullcontext, suppress
from functools import partial

from cb_backend.contracts.errors import GaveUpError, UnavailableError
from cb_backend.contracts.messages import (
    AddRequest,
    CancelRequests,
    EngineFailed,
    Goodbye,
    ModelInfo,
    encode,
    token_ids_to_bytes,
)
from cb_backend.contracts.pooling import ModelTasks
from cb_backend.contracts.request import RequestStatus, split_request_id
from cb_backend.engine.engine_process import EngineProcess
from cb_backend.engine.llm_engine import LLMEngine, _salt_bytes
from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.kv_cache.block_pool import CachedBlock
from cb_backend.kv_cache.manager import HashBlock
from cb_backend.study.static_admission import StaticAdmission
from cb_backend.support import fault_points
from tests.fakes.runners import HashModel, HashRunner
from tests.simulation.adapters import Reader, ReadersInTurns, salt_of, source_of
from tests.simulation.adapters import may_be_refused as may_refuse_adapter
from tests.simulation.checks import CheckedEngine
from tests.simulation.clients import FAILED, GONE, INTERNAL, REFUSED, UNAVAILABLE, Answer
from tests.simulation.expectations import check_cached_content, check_counters, is_due, lone_output
from tests.simulation.grammars import MasksInPlace, SimulatedCompiler, may_be_refused
from tests.simulation.idle import check_figures, check_nothing_left
from tests.simulation.network import NoGarbage, SimulatedClient, SimulatedLink, Wires
from tests.simulation.ranks import TwoRanks
from tests.simulation.scenario import Arrival, Fault, Scenario

MAX_IDLE_TURNS = 3
REAL_THREADS_EVERY = 8  # worlds: of the others the threads that fill masks are made up as well
QUIET_TURNS_UNCHECKED = 8  # where nothing happens, as while a grammar is compiled, every so many turns are checked
# Points whose failure costs one request or one step; any other ends the engine process, which is started again.
CONTAINED = {
    "engine.make_request", "scheduler.add_request", "engine.execute", "engine.result", "process.stats",
    "front_end.deliver", "front_end.text",
}  # fmt: skip


class InjectedError(RuntimeError):
    """Raised at a fault point."""


class World:
    """`run()` raises `AssertionError` at the first broken invariant, and returns what has happened."""

    def __init__(self, scenario: Scenario, hash_block: HashBlock | None = None) -> None:
        logging.getLogger("cb_backend").setLevel(logging.CRITICAL + 1)
        self.scenario = scenario
        self.hash_block = hash_block
        self.counters: Counter[str] = Counter()
        self.model = HashModel(scenario.vocab_size, scenario.stop_chance, scenario.windows)
        self.turn = 0
        self.now = 0.0
        self.reached: Counter[int] = Counter()  # by a fault's place in the scenario: times that it could have fired
        self.fired: Counter[str] = Counter()
        self.clients = [SimulatedClient(front_end_id) for front_end_id in range(3)]
        self.answers: dict[int, Answer] = {}
        self.to_cancel: list[Answer] = []  # in their time, or in a state that they have not been in
        self.faults: dict[str, list[tuple[int, Fault]]] = {}  # by point, with their places in the scenario
        for place, fault in enumerate(scenario.faults):
            self.faults.setdefault(fault.point, []).append((place, fault))
        limits = (scenario.config, *(arrival.scheduling for arrival in scenario.arrivals))
        self.has_deadlines = any(limit.timeout_ms or limit.queue_timeout_ms for limit in limits)
        self.salts = {a.request_id: _salt_bytes(a.scheduling.cache_salt) for a in scenario.arrivals}
        self.num_lives = 0
        self.start_life()

    def run(self) -> Counter[str]:
        try:
            with fault_points.armed(self._reach) if self.faults else nullcontext():
                self._run()
            self._check_end()
        finally:
            self.engine.engine.close()
            for client in self.clients:
                client.give_back()
        return self.counters

    def start_life(self) -> None:
        """A fresh engine process; the front ends connect to it."""
        scenario, config = self.scenario, self.scenario.config
        has_ranks = config.tensor_parallel_size > 1
        runner = (partial(TwoRanks, scenario) if has_ranks else HashRunner)(
            self.model, scenario.num_blocks, config.block_size, salts=self.salts,
            fails_at={a.request_id: a.fails_at for a in scenario.arrivals if a.fails_at is not None},
            is_delayed=scenario.is_delayed, num_host_blocks=scenario.num_host_blocks,
        )  # fmt: skip
        runner.adapters = Reader()
        info = ModelInfo(
            model="fake", tokenizer_dir="", vocab_size=max(scenario.vocab_size, 261),
            max_model_len=scenario.max_model_len, eos_token_ids=(), block_size=config.block_size,
            num_blocks=scenario.num_blocks - 1, max_num_seqs=config.max_num_seqs, dtype="float32", device="cpu",
            num_host_blocks=scenario.num_host_blocks, kv_windows=scenario.windows,
            tasks=ModelTasks(embedding_size=8),
            num_adapter_slots=scenario.num_adapter_slots,
        )  # fmt: skip
        policy: PolicyKind = StaticAdmission if scenario.is_static else ContinuousAdmission
        engine = LLMEngine(config, runner, info, lambda: self.now, policy)
        engine.grammars = SimulatedCompiler(lambda: self.turn)  # type: ignore[assignment]
        if engine.adapters is not None:
            engine.adapters._new_pool = lambda: ReadersInTurns(lambda: self.turn)  # type: ignore[assignment,return-value]
        if scenario.seed % REAL_THREADS_EVERY:
            engine._guided._threads = MasksInPlace()  # type: ignore[assignment]
        engine.scheduler._swap.fixed_cost_tokens = 0  # the requests of these worlds are short
        if self.hash_block is not None:
            engine.scheduler._kv._hash_block = self.hash_block
        self.num_lives += 1
        self.runner = runner
        self.engine = CheckedEngine(scenario, engine, runner, self.answers, self.counters)
        self.wires = Wires()
        self.link = SimulatedLink(self.wires)
        self.process = EngineProcess(engine, self.link, lambda: self.now)
        self.process._garbage = NoGarbage()  # type: ignore[assignment]
        self.counts: tuple[int, ...] = ()
        self.state: tuple[object, ...] = ()  # as it was checked last
        self.num_quiet_turns = 0
        self.looked_at: set[CachedBlock] = set()  # cached blocks whose content was right; no plan writes such a block
        for client in self.clients:
            client.attach(self.wires)

    # ---- what happens ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        scenario, arrivals = self.scenario, deque(self.scenario.arrivals)
        idle_turns = 0
        self._engine_turn()  # hello
        while arrivals or self._open_answers():
            turn = self.turn
            self.now = turn * scenario.step_s
            if turn == scenario.front_end_dies_at:
                self._kill_front_end(self.clients[1])
            if turn == scenario.resets_cache_at:
                self.counters["cache resets"] += 1
                self.engine.scheduler.reset_prefix_cache()
            if turn == scenario.rank_dies_at and isinstance(self.runner, TwoRanks):
                self.runner.second.die("killed")
            while arrivals and arrivals[0].at_step <= turn:
                self._arrive(arrivals.popleft())
            self._cancel_some(turn)
            before = self._progress()
            if turn == scenario.engine_dies_at:
                self._end_life()
            else:
                self._engine_turn()
            is_idle = self._progress() == before and self._is_owed()
            idle_turns = idle_turns + 1 if is_idle else 0
            # Results of rows that were cancelled or preempted meanwhile may have to come back first.
            assert idle_turns <= MAX_IDLE_TURNS + scenario.run_ahead, "I9: no progress"
            if self.num_quiet_turns % QUIET_TURNS_UNCHECKED == 0:
                check_cached_content(self.engine.kv, self.runner, self.looked_at if turn % 16 else None)
            self.turn += 1

    def _progress(self) -> int:
        """Grows when a token is computed, or a request ends."""
        num_ended = len(self.answers) - len(self._open_answers())
        return sum(self.runner.num_computed.values()) + num_ended + self.num_lives

    def _is_owed(self) -> bool:
        """Whether somebody waits for an answer, and not for a grammar."""
        return any(not self.engine.is_held(answer.arrival.request_id) for answer in self._open_answers())

    def _open_answers(self) -> list[Answer]:
        return [answer for answer in self.answers.values() if answer.end is None]

    def _reach(self, point: str) -> None:
        is_due = False
        for place, fault in self.faults.get(point, ()):
            if fault.step is not None and fault.step not in self.engine.traits_of_step(point):
                continue
            self.reached[place] += 1
            if fault.nth <= self.reached[place] < fault.nth + fault.times:
                is_due = True
                if fault.step is not None:
                    self.counters[f"failed step: {fault.step}"] += 1
        if is_due:
            self.fired[point] += 1
            if self._open_answers():  # otherwise nobody could have been harmed
                self.counters[f"fault: {point}"] = 1
            raise InjectedError(point)

    def _engine_turn(self) -> None:
        """Front ends send, the engine process goes once round its loop, front ends read."""
        due = self._due()
        for client in self.clients:
            client.send()
        num_frames = len(self.wires.to_engine)
        try:
            self.process.turn()
        except GaveUpError as error:
            self._give_up(error)
        except InjectedError as error:
            self._check_may_end_the_engine(str(error))
            self._end_life()
        else:
            for client in self.clients:
                try:
                    client.receive()
                except InjectedError:  # the client's thread sets its line up again
                    client._abandoned += client._sinks
                    client._fail_open_requests("the line broke")
                    client._outbox.append(encode(CancelRequests(client._abandoned)))
            self._check_turn(due, num_frames)
        if self.engine.violation is not None:
            raise self.engine.violation

    def _give_up(self, error: GaveUpError) -> None:
        """As the engine process does: its last words, and its end."""
        self.counters["lost ranks"] += isinstance(self.runner, TwoRanks) and self.runner.lost() is not None
        self.link.send_to_all(EngineFailed(str(error)))
        self._end_life()

    def _check_may_end_the_engine(self, point: str) -> None:
        assert point not in CONTAINED, f"a failure at {point} must not end the engine"

    def _end_life(self) -> None:
        """The engine process is gone: every open request gets an error at once, and a new engine is started."""
        self.counters["engine deaths"] += 1
        for client in self.clients:
            with suppress(InjectedError):  # at the engine's last words
                client.end_life()
        assert not self._open_answers(), "P10: an open request was not told of the engine's end"
        for answer in self.answers.values():
            answer.has_timed_out |= answer.end == UNAVAILABLE and "timed out after" in answer.message
        if self.engine.violation is not None:
            raise self.engine.violation
        self._count_life()
        self.engine.engine.close()
        self.start_life()
        try:
            self.process.turn()
            for client in self.clients:
                client.receive()
        except InjectedError:
            self._end_life()

    def _arrive(self, arrival: Arrival) -> None:
        client = self.clients[split_request_id(arrival.request_id)[0]]
        salt = salt_of(arrival, self.salts[arrival.request_id])
        expected = lone_output(self.scenario, self.model, arrival, salt)
        pooled = self.model.lone_hash(arrival.prompt, salt) if arrival.pooling else None
        answer = self.answers[arrival.request_id] = Answer(arrival, client, expected, self.now, pooled)
        if arrival.cancel_at is not None or arrival.cancel_in is not None:
            self.to_cancel.append(answer)
        prompt = token_ids_to_bytes(list(arrival.prompt))
        try:
            wanted = AddRequest(arrival.request_id, prompt, arrival.rules, arrival.scheduling, source_of(arrival))
            client.submit(wanted, answer)
        except UnavailableError:
            answer.end = UNAVAILABLE

    def _kill_front_end(self, client: SimulatedClient) -> None:
        """Its process is gone, and a new one takes its place; the engine finds out."""
        self.counters["front end deaths"] += 1
        self.link.kill(client.front_end_id)
        for answer in self.answers.values():
            if answer.client is client and answer.is_open:
                answer.end = GONE
        client._sinks.clear()
        client._outbox.clear()
        self.process._next_watch = self.now
        try:
            self.process._watch_processes(self.now)
        except GaveUpError as error:  # it looks after the ranks too
            self._give_up(error)
        except InjectedError:
            self._end_life()
        else:
            client.attach(self.wires)

    def _cancel_some(self, turn: int) -> None:
        for answer in tuple(self.to_cancel):
            arrival, state = answer.arrival, self._state(answer)
            if turn == arrival.cancel_at or (state == arrival.cancel_in and not answer.was_cancelled):
                self.counters[f"cancelled: {state}"] += not answer.was_cancelled
                answer.was_cancelled = True
                answer.cancel()
                answer.cancel()  # the second does nothing
            if (arrival.cancel_at or 0) <= turn and (arrival.cancel_in is None or answer.was_cancelled):
                self.to_cancel.remove(answer)

    def _state(self, answer: Answer) -> str:
        request = self.engine.requests.get(answer.arrival.request_id)
        if not answer.is_open:
            return "ended"
        if self.engine.is_held(answer.arrival.request_id):
            return "compiling"
        if request is None or request.status is RequestStatus.WAITING:
            return "waiting"
        if request.status is RequestStatus.PREEMPTED:
            return "swapped" if self.engine.scheduler._swap.num_tokens(request) else "preempted"
        table = self.engine.scheduler._table
        is_prefilling = table.num_computed_tokens[request.slot] < table.num_prefill_tokens[request.slot]
        return "prefilling" if is_prefilling else "decoding"

    # ---- what must hold -------------------------------------------------------------------------------------------

    def _due(self) -> set[int]:
        """Requests whose timeout has passed, and that the engine must end in its next turn."""
        if not self.has_deadlines or not self.process.engine.has_unfinished():
            return set()
        engine, config, now = self.engine, self.scenario.config, self.now
        known = [rid for rid, answer in self.answers.items() if answer.end is None and rid in engine.requests]
        return {
            rid for rid in known
            if is_due(config, engine.requests[rid], engine.arrived_at[rid], now, rid in engine.last_row)
        }  # fmt: skip

    def _check_turn(self, due: set[int], num_frames: int) -> None:
        """`num_frames`: that were on their way to the engine before the turn."""
        engine = self.engine
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

    def _check_end(self) -> None:
        for _ in range(2 + self.scenario.run_ahead):  # cancels are still on their way, and launched steps
            self._engine_turn()
        check_nothing_left(self.scenario, self.engine, self.link, self.clients)
        if self.num_lives == 1 and not self.fired:
            check_figures(self.engine, self.answers)
        self.engine.scheduler.check_integrity()
        check_cached_content(self.engine.kv, self.runner)
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
        self._count_life()
        for client in self.clients:
            client._socket.send(encode(Goodbye(client.front_end_id)), 0)  # type: ignore[union-attr]
        self.process.turn()
        assert self.process.is_stopping, "I19: the engine stays after its last front end"

    def _count_life(self) -> None:
        stats = self.engine.scheduler.stats()
        self.counters["preemptions"] += stats.num_preemptions
        self.counters["swap ins"] += stats.num_swapped_in
        self.counters["evicted blocks"] += stats.num_evicted_blocks
        self.counters["prefix hit tokens"] += stats.num_cached_prompt_tokens
