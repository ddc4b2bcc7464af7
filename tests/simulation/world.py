"""Runs one scenario on the real engine loop, scheduler, block manager and front-end protocol, under a virtual clock.

What happens, turn by turn: arrivals, cancels, faults, deaths of processes. Made up are only the model and the network
(`life`) and what the clients do. I9 there is progress · I19 a goodbye ends the process · I20 after a crash a new life
serves. What else must be so: `verdict` after each turn and at the end, `checks` and `plan_checks` in each call.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from contextlib import nullcontext, suppress

from cb_backend.contracts.errors import GaveUpError, UnavailableError
from cb_backend.contracts.messages import (
    AddRequest,
    CancelRequests,
    EngineFailed,
    Goodbye,
    encode,
    token_ids_to_bytes,
)
from cb_backend.contracts.request import RequestStatus, split_request_id
from cb_backend.kv_cache.block_pool import HashBlock
from cb_backend.support import fault_points
from tests.fakes.hash_rule import HashModel
from tests.simulation.adapters import salt_of, source_of
from tests.simulation.clients import GONE, UNAVAILABLE, Answer
from tests.simulation.expectations import lone_output
from tests.simulation.life import Clocks, Life
from tests.simulation.network import SimulatedClient
from tests.simulation.ranks import TwoRanks
from tests.simulation.scenario import Arrival, Fault, Scenario
from tests.simulation.verdict import Verdict

MAX_IDLE_TURNS = 3
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
        self.verdict = Verdict(scenario, self.answers, self.counters, self.fired)
        self.num_lives = 0
        self.start_life()

    def run(self) -> Counter[str]:
        try:
            with fault_points.armed(self._reach) if self.faults else nullcontext():
                self._run()
            self._end()
        finally:
            self.life.engine.engine.close()
            for client in self.clients:
                client.give_back()
        return self.counters

    def start_life(self) -> None:
        """A fresh engine process; the front ends connect to it."""
        clocks = Clocks(lambda: self.now, lambda: self.turn)
        self.life = Life(self.scenario, self.model, self.answers, self.counters, clocks, self.hash_block)
        self.num_lives += 1
        self.verdict.begin_life(self.life)
        for client in self.clients:
            client.attach(self.life.wires)

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
                self.life.engine.scheduler.reset_prefix_cache()
            if turn == scenario.rank_dies_at and isinstance(self.life.runner, TwoRanks):
                self.life.runner.second.die("killed")
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
            self.verdict.check_cache(turn)
            self.turn += 1

    def _progress(self) -> int:
        """Grows when a token is computed, or a request ends."""
        num_ended = len(self.answers) - len(self._open_answers())
        return sum(self.life.runner.num_computed.values()) + num_ended + self.num_lives

    def _is_owed(self) -> bool:
        """Whether somebody waits for an answer, and not for a grammar."""
        return any(not self.life.engine.is_held(answer.arrival.request_id) for answer in self._open_answers())

    def _open_answers(self) -> list[Answer]:
        return [answer for answer in self.answers.values() if answer.end is None]

    def _reach(self, point: str) -> None:
        is_due = False
        for place, fault in self.faults.get(point, ()):
            if fault.step is not None and fault.step not in self.life.engine.traits_of_step(point):
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
        due = self.verdict.due(self.now)
        for client in self.clients:
            client.send()
        num_frames = len(self.life.wires.to_engine)
        try:
            self.life.process.turn()
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
            self.verdict.check_turn(due, num_frames)
        if self.life.engine.violation is not None:
            raise self.life.engine.violation

    def _give_up(self, error: GaveUpError) -> None:
        """As the engine process does: its last words, and its end."""
        self.counters["lost ranks"] += isinstance(self.life.runner, TwoRanks) and self.life.runner.lost() is not None
        self.life.link.send_to_all(EngineFailed(str(error)))
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
        if self.life.engine.violation is not None:
            raise self.life.engine.violation
        self.verdict.count_life()
        self.life.engine.engine.close()
        self.start_life()
        try:
            self.life.process.turn()
            for client in self.clients:
                client.receive()
        except InjectedError:
            self._end_life()

    def _arrive(self, arrival: Arrival) -> None:
        client = self.clients[split_request_id(arrival.request_id)[0]]
        salt = salt_of(arrival, self.life.salts[arrival.request_id])
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
        self.life.link.kill(client.front_end_id)
        for answer in self.answers.values():
            if answer.client is client and answer.is_open:
                answer.end = GONE
        client._sinks.clear()
        client._outbox.clear()
        self.life.process._next_watch = self.now
        try:
            self.life.process._watch_processes(self.now)
        except GaveUpError as error:  # it looks after the ranks too
            self._give_up(error)
        except InjectedError:
            self._end_life()
        else:
            client.attach(self.life.wires)

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
        request = self.life.engine.requests.get(answer.arrival.request_id)
        if not answer.is_open:
            return "ended"
        if self.life.engine.is_held(answer.arrival.request_id):
            return "compiling"
        if request is None or request.status is RequestStatus.WAITING:
            return "waiting"
        if request.status is RequestStatus.PREEMPTED:
            return "swapped" if self.life.engine.scheduler._swap.num_tokens(request) else "preempted"
        table = self.life.engine.scheduler._table
        is_prefilling = table.num_computed_tokens[request.slot] < table.num_prefill_tokens[request.slot]
        return "prefilling" if is_prefilling else "decoding"

    def _end(self) -> None:
        """Everybody has his answer: what is on its way comes back, and the front ends say goodbye."""
        for _ in range(2 + self.scenario.run_ahead):  # cancels are still on their way, and launched steps
            self._engine_turn()
        self.verdict.check_end(self.clients, is_first_life=self.num_lives == 1)
        for client in self.clients:
            client._socket.send(encode(Goodbye(client.front_end_id)), 0)  # type: ignore[union-attr]
        self.life.process.turn()
        assert self.life.process.is_stopping, "I19: the engine stays after its last front end"
