"""One life of a simulated engine process, and what stands in for devices, threads and the network around it.

The loop, the engine, the scheduler and the block manager are real; the runner is H (`tests.fakes.runners`), or two
ranks of it. Grammars and adapters are ready after a number of turns, not when threads have done their work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.pooling import ModelTasks
from cb_backend.engine.engine_loop import EngineProcess
from cb_backend.engine.llm_engine import LLMEngine, _salt_bytes
from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.kv_cache.block_pool import HashBlock
from cb_backend.study.static_admission import StaticAdmission
from tests.fakes.hash_rule import HashModel
from tests.fakes.runners import HashRunner
from tests.simulation.adapters import Reader, ReadersInTurns
from tests.simulation.checks import CheckedEngine
from tests.simulation.clients import Answer
from tests.simulation.grammars import MasksInPlace, SimulatedCompiler
from tests.simulation.network import NoGarbage, SimulatedLink, Wires
from tests.simulation.ranks import TwoRanks
from tests.simulation.scenario import Scenario

REAL_THREADS_EVERY = 8  # worlds: of the others the threads that fill masks are made up as well


class Clocks(NamedTuple):
    """A world's: seconds, and turns of its engine."""

    now: Callable[[], float]
    turn: Callable[[], int]


class Life:
    """An engine process as it is just started, which no front end has joined yet."""

    def __init__(
        self,
        scenario: Scenario,
        model: HashModel,
        answers: dict[int, Answer],
        counters: Counter[str],
        clocks: Clocks,
        hash_block: HashBlock | None,
    ) -> None:
        self.salts = {a.request_id: _salt_bytes(a.scheduling.cache_salt) for a in scenario.arrivals}
        self.runner = self._make_runner(scenario, model)
        engine = self._make_engine(scenario, clocks)
        if hash_block is not None:
            engine.scheduler._kv._hash_block = hash_block
        self.engine = CheckedEngine(scenario, engine, self.runner, answers, counters)
        self.wires = Wires()
        self.link = SimulatedLink(self.wires)
        self.process = EngineProcess(engine, self.link, clocks.now)
        self.process._garbage = NoGarbage()  # type: ignore[assignment]

    def _make_runner(self, scenario: Scenario, model: HashModel) -> HashRunner:
        config = scenario.config
        has_ranks = config.tensor_parallel_size > 1
        runner = (partial(TwoRanks, scenario) if has_ranks else HashRunner)(
            model, scenario.num_blocks, config.block_size, salts=self.salts,
            fails_at={a.request_id: a.fails_at for a in scenario.arrivals if a.fails_at is not None},
            is_delayed=scenario.is_delayed, num_host_blocks=scenario.num_host_blocks,
        )  # fmt: skip
        runner.adapters = Reader()
        return runner

    def _make_engine(self, scenario: Scenario, clocks: Clocks) -> LLMEngine:
        config = scenario.config
        info = ModelInfo(
            model="fake", tokenizer_dir="", vocab_size=max(scenario.vocab_size, 261),
            max_model_len=scenario.max_model_len, eos_token_ids=(), block_size=config.block_size,
            num_blocks=scenario.num_blocks - 1, max_num_seqs=config.max_num_seqs, dtype="float32", device="cpu",
            num_host_blocks=scenario.num_host_blocks, kv_windows=scenario.windows,
            tasks=ModelTasks(embedding_size=8),
            num_adapter_slots=scenario.num_adapter_slots,
        )  # fmt: skip
        policy: PolicyKind = StaticAdmission if scenario.is_static else ContinuousAdmission
        engine = LLMEngine(config, self.runner, info, clocks.now, policy)
        engine.grammars = SimulatedCompiler(clocks.turn)  # type: ignore[assignment]
        if engine.adapters is not None:
            engine.adapters._new_pool = lambda: ReadersInTurns(clocks.turn)  # type: ignore[assignment,return-value]
        if scenario.seed % REAL_THREADS_EVERY:
            engine._guided._threads = MasksInPlace()  # type: ignore[assignment]
        engine.scheduler._swap.fixed_cost_tokens = 0  # the requests of these worlds are short
        return engine
