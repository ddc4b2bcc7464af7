"""A scheduler and a fake runner, driven by hand: what tests of single situations need."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.request import FinishReason, Request
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.step import NO_TOKEN, EngineOutput, NoMasks, StepPlan
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.engine.scheduler.scheduler import Scheduler
from cb_backend.kv_cache.make_manager import make_manager
from tests.fakes.plan_follower import FakePending
from tests.fakes.runners import ScriptedRunner

MAX_STEPS = 20_000


def ten_plus_index(request_id: int, index: int) -> int:
    """The usual script: output 10, 11, 12, ..."""
    return 10 + index


def info_of(config: EngineConfig, num_blocks: int, max_model_len: int, windows: tuple[int, ...]) -> ModelInfo:
    """Of a model that has nothing but a cache of `num_blocks` usable blocks."""
    return ModelInfo(
        model="fake", tokenizer_dir="", vocab_size=1000, max_model_len=max_model_len, eos_token_ids=(),
        block_size=config.block_size, num_blocks=num_blocks, max_num_seqs=config.max_num_seqs, dtype="float32",
        device="cpu", kv_windows=windows,
    )  # fmt: skip


class FakeEngine:
    """`num_blocks` counts usable blocks. Other keywords are engine arguments."""

    def __init__(
        self,
        num_blocks: int = 100,
        max_model_len: int = 1000,
        script: Callable[[int, int], int] = ten_plus_index,
        run_ahead: int = 0,
        num_host_blocks: int = 0,
        policy: PolicyKind = ContinuousAdmission,
        windows: tuple[int, ...] = (0,),
        num_adapter_slots: int = 0,
        **arguments: Any,
    ) -> None:
        # Nothing is kept for what is expected, so that a situation of scarcity is what the test makes it.
        usual = {"model": "fake", "block_size": 4, "run_ahead": run_ahead, "admission_reserve": -10.0}
        usual["enable_lora"] = num_adapter_slots > 0
        config = EngineConfig(**{**usual, **arguments})
        self.kv = make_manager(config, info_of(config, num_blocks, max_model_len, windows), run_ahead)
        self.scheduler = Scheduler(config, self.kv, max_model_len, num_host_blocks, policy, num_adapter_slots)
        self.runner = ScriptedRunner(config.block_size, script, run_ahead > 0, windows)
        self.run_ahead = run_ahead
        self.max_model_len = max_model_len
        self.in_flight: deque[tuple[StepPlan, FakePending]] = deque()
        self.plans: list[StepPlan] = []
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}

    def add(
        self,
        request_id: int,
        prompt: int | list[int],
        *,
        stop_ids: tuple[int, ...] = (),
        scheduling: SchedulingParams | None = None,
        is_held: bool = False,
        adapter: bytes = b"",
        **params: Any,
    ) -> Request:
        """Queue a request; an integer prompt is that many tokens of its own."""
        tokens = [request_id] * prompt if isinstance(prompt, int) else prompt
        sampling = TokenRules(**{"max_tokens": 8, **params})
        total = min(len(tokens) + sampling.max_tokens, self.max_model_len)
        request = Request(request_id, np.array(tokens, np.int32), len(tokens), sampling, stop_ids, total)
        request.scheduling = scheduling or SchedulingParams()
        request.adapter = adapter
        self.scheduler.add_request(request, is_held)
        self.tokens[request_id] = []
        return request

    def launch(self) -> StepPlan | None:
        """Schedule one step and hand it to the runner."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.runner.execute(plan, NoMasks())))
        self.scheduler.check_integrity()
        return plan

    def finish(self) -> EngineOutput:
        """Read the oldest launched step."""
        _, pending = self.in_flight.popleft()
        output = self.scheduler.update_from_output(pending.result())
        self.take(output)
        self.scheduler.check_integrity()
        return output

    def take(self, output: EngineOutput) -> None:
        columns = (output.request_ids, output.token_ids, output.finish_reasons)
        for request_id, token_id, reason in zip(*(column.tolist() for column in columns), strict=True):
            assert request_id not in self.reasons, "output after the end"
            if token_id != NO_TOKEN:
                self.tokens[request_id].append(token_id)
            if reason:
                self.reasons[request_id] = FinishReason(reason)

    def step(self) -> StepPlan | None:
        """What the engine loop does: keep run_ahead + 1 steps launched, then read the oldest."""
        plan = None
        while len(self.in_flight) <= self.run_ahead:
            launched = self.launch()
            if launched is None:
                break
            plan = launched
        if self.in_flight:
            self.finish()
        return plan

    def run(self) -> None:
        """Step until nothing is left. Fails if it does not end."""
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_unfinished():
                stats = self.scheduler.stats()
                assert stats.num_free_blocks == stats.num_blocks, "idle, but blocks are missing"
                return
            self.step()
        raise AssertionError("the engine does not come to an end")
