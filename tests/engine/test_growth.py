"""Memory over many requests: what the engine process and a front end's client keep must not grow with them.

Objects are counted, not bytes of the process: that is exact, and says in seconds what a soak says in hours. (What
allocators and libraries keep besides is the soak's business: python -m tests.faults.soak.)
"""

from __future__ import annotations

import gc
import logging
import random
import sys
from collections import deque

import pytest

from cb_backend.contracts.errors import ErrorCode
from cb_backend.contracts.messages import AddRequest, token_ids_to_bytes
from cb_backend.contracts.request import make_request_id
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.engine_loop import EngineProcess
from cb_backend.engine.llm_engine import LLMEngine
from tests.fakes.counting_runner import FAILING_ROW_TOKEN, create_runner
from tests.front_end.engines import counting_config
from tests.simulation.network import NoGarbage, SimulatedClient, SimulatedLink, Wires

FRONT_END = 1
NUM_REQUESTS = 400  # a round
WARM_UP_ROUNDS = 4  # until nearly all that has a bound has reached it
ROUNDS = 3
MAX_GROWTH = NUM_REQUESTS  # objects a round; what is known of one request is dozens


class _Sink:
    """Hears one request and keeps nothing."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_ends = 0

    def on_tokens(self, token_ids: tuple[int, ...], finish_reason: int) -> None:
        self.num_tokens += len(token_ids)
        self.num_ends += finish_reason != 0

    def on_scheduled(self, scheduled_at: float) -> None:
        pass

    def on_error(self, code: ErrorCode, message: str) -> None:
        self.num_ends += 1


class _Loop:
    """The engine process's loop and a client of it, turn by turn in this process."""

    def __init__(self) -> None:
        scarce = {"num_gpu_blocks_override": 32, "max_queue_size": 16, "admission_reserve": -10.0}
        config = counting_config(max_num_seqs=16, **scarce)
        runner, info = create_runner(config)
        self.engine = LLMEngine(config, runner, info)
        self.engine.log.records = deque(maxlen=64)  # steps that are remembered: soon as many as ever
        wires = Wires()
        self.process = EngineProcess(self.engine, SimulatedLink(wires))
        self.process._garbage = NoGarbage()  # type: ignore[assignment]
        self.client = SimulatedClient(FRONT_END)
        self.client.attach(wires)
        self.rng = random.Random(0)
        self._counter = 0

    def turn(self) -> None:
        self.client.send()
        self.process.turn()
        self.client.receive()

    def serve(self, num_requests: int) -> None:
        """Two thirds of the prompts are new, a tenth is cancelled, some fail, some are refused."""
        rng, num_left, open_sinks = self.rng, num_requests, dict[int, _Sink]()
        while num_left or open_sinks:
            while num_left and len(open_sinks) < 40:
                num_left -= 1
                request_id, sink = self._submit()
                open_sinks[request_id] = sink
                if rng.random() < 0.02:
                    self.client.cancel([request_id])
                    del open_sinks[request_id]
            self.turn()
            for request_id, sink in list(open_sinks.items()):
                assert sink.num_ends <= 1
                if sink.num_ends:
                    del open_sinks[request_id]
                elif rng.random() < 0.005:
                    self.client.cancel([request_id])
                    del open_sinks[request_id]
        while self.engine.has_unfinished():
            self.turn()

    def _submit(self) -> tuple[int, _Sink]:
        rng = self.rng
        self._counter += 1
        is_new = rng.random() < 2 / 3
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 60))] if is_new else list(range(rng.randint(1, 60)))
        kind = rng.random()
        if kind < 0.01:
            prompt[-1] = FAILING_ROW_TOKEN
        elif kind < 0.03:
            prompt[-1] = 10**6  # outside the vocabulary
        request_id, sink = make_request_id(FRONT_END, self._counter), _Sink()
        params = TokenRules(max_tokens=rng.randint(1, 24), seed=0)
        scheduling = SchedulingParams(tenant=f"tenant {rng.randrange(5)}", priority=rng.randint(-1, 1))
        self.client.submit(AddRequest(request_id, token_ids_to_bytes(prompt), params, scheduling), sink)
        return request_id, sink

    def close(self) -> None:
        self.engine.close()
        self.client.give_back()


def num_objects() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def test_u1_nothing_is_kept_of_requests_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case U1, and the measure itself: two small objects a request would be found."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps what is logged
    loop = _Loop()
    try:
        loop.turn()
        for _ in range(WARM_UP_ROUNDS):
            loop.serve(NUM_REQUESTS)
        growth = []
        for _ in range(ROUNDS):
            before = num_objects()
            loop.serve(NUM_REQUESTS)
            growth.append(num_objects() - before)
        stats = loop.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        happened = {
            "preemptions": stats.num_preemptions,
            "cancelled": stats.num_cancelled,
            "refused": stats.num_refused,
            "cached": stats.num_cached_prompt_tokens,
        }
        assert all(happened.values()), f"the load is not as mixed as it should be: {happened}"
        leak = [[[]] for _ in range(NUM_REQUESTS)]
        assert num_objects() - before >= NUM_REQUESTS, "the measure sees two small objects a request"
        del leak
        # A table that grows to its next size does so in one round; what is kept of each request, in all of them.
        assert min(growth) < MAX_GROWTH, growth
    finally:
        loop.close()
