"""The engine in one process: a scheduler and a model runner, driven step by step.

No I/O, no threads: requests in, `EngineOutput`s out. The owner may replace the function that tells the time. Run-ahead
lives here: up to `run_ahead` steps are launched before the oldest's result is read, so no device waits for its host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.adapters import NOT_ENABLED, AdapterSource
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import CbError, ConfigError, GaveUpError, InvalidRequestError
from cb_backend.contracts.messages import EngineStats, ModelInfo
from cb_backend.contracts.queue_room import QueueRoom
from cb_backend.contracts.request import Request
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.step import EngineOutput, Pending, Runner, StepPlan, StepResult, WatchedRunner
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.adapter_wait import adapter_wait, leaving
from cb_backend.engine.adapters import new_adapter_store
from cb_backend.engine.grammar.grammar_compiler import GrammarCompiler
from cb_backend.engine.grammar.grammar_wait import grammar_wait
from cb_backend.engine.grammar.guide import Guide
from cb_backend.engine.grammar.guided_rows import FedStep, GuidedRows
from cb_backend.engine.held_requests import HeldRequests
from cb_backend.engine.runner_choice import choose_runner
from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.engine.scheduler.scheduler import Scheduler
from cb_backend.engine.step_log import StepLog
from cb_backend.kv_cache.make_manager import make_manager
from cb_backend.support.fault_points import reach


class StepFailedError(Exception):
    """A whole step raised; `output` ends every request that was part of it. The engine can go on."""

    def __init__(self, output: EngineOutput, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.output = output


class LaunchedStep(msgspec.Struct, eq=False):
    """A step on its way. Whoever asks first for its result waits for it."""

    plan: StepPlan
    pending: Pending
    fed: FedStep | None = None  # its rows that have guides
    known: StepResult | None = None

    def result(self) -> StepResult:
        """Always the same; the runner is asked once."""
        if self.known is None:
            self.known = self.pending.result()
        return self.known


class LLMEngine:
    """Requests in, tokens out. Not thread-safe: one owner calls everything."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        info: ModelInfo,
        clock: Callable[[], float] = time.monotonic,
        policy: PolicyKind = ContinuousAdmission,
    ) -> None:
        """`policy` as in `Scheduler`."""
        self.config = config
        self.info = info
        self.runner = runner
        self._watched = runner if isinstance(runner, WatchedRunner) else None
        self.run_ahead = config.steps_ahead(info.device)
        kv = make_manager(config, info, self.run_ahead)
        self.scheduler = Scheduler(config, kv, info.max_model_len, info.num_host_blocks, policy, info.num_adapter_slots)
        self.log = StepLog(self.scheduler.num_slots, info.num_blocks, info.block_size, self.scheduler.running, clock)
        self.grammars = GrammarCompiler(info.tokenizer_dir, info.vocab_size, info.eos_token_ids)
        self.adapters = new_adapter_store(config, info, runner)
        self._held = HeldRequests()
        self._guided = GuidedRows()
        self._clock = clock
        self._launch = self._launch_plan if config.max_itl_ms is None else self._launch_timed  # without, no clock
        self._launched: deque[LaunchedStep] = deque()  # oldest first

    def make_request(
        self,
        request_id: int,
        prompt_token_ids: NDArray[np.int32],
        params: TokenRules,
        scheduling: SchedulingParams | None = None,
        adapter: AdapterSource | None = None,
    ) -> Request:
        """Check a request against the model and complete it with what the model knows.

        Raises `InvalidRequestError` for ids outside the vocabulary, values out of range, an adapter where there are
        none. The prompt's length is the scheduler's to check.
        """
        reach("engine.make_request")
        highest, lowest = int(prompt_token_ids.max(initial=0)), int(prompt_token_ids.min(initial=0))
        if lowest < 0 or highest >= self.info.vocab_size:
            bad = lowest if lowest < 0 else highest
            raise InvalidRequestError(f"token id {bad} is outside the vocabulary (0 to {self.info.vocab_size - 1})")
        params.check(self.info.vocab_size)
        self.info.tasks.check(params.pooling)
        params.check_prompt(len(prompt_token_ids))
        scheduling = scheduling or SchedulingParams()
        scheduling.check()
        # A grammar says itself where the output ends; with ignore_eos not before it must.
        eos = () if params.ignore_eos and params.structured_output is None else self.info.eos_token_ids
        if adapter is not None and self.adapters is None:
            raise InvalidRequestError(NOT_ENABLED)
        num_prompt_tokens = len(prompt_token_ids)
        return Request(
            request_id=request_id,
            token_ids=prompt_token_ids,
            num_prompt_tokens=num_prompt_tokens,
            params=params,
            stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
            # The scheduler lowers it to what fits.
            max_total_tokens=num_prompt_tokens + (params.max_tokens if params.pooling is None else 0),
            cache_salt=_salt_bytes(scheduling.cache_salt) + self.runner.cache_key(num_prompt_tokens),
            scheduling=scheduling,
            adapter_source=adapter,
        )

    def add_request(self, request: Request) -> None:
        """Queue a request. `InvalidRequestError` if it can never run, `UnavailableError` if the queue is full.

        One whose adapter or grammar is not ready yet waits for it without a slot; see `release_held`.
        """
        now = self._clock()
        self.scheduler.set_time(now)
        waits = adapter_wait(self.adapters, request, now, self.config.priority_aging_s)
        with leaving(waits):
            if (grammar := grammar_wait(self.grammars, request, now)) is not None:
                waits.append(grammar)
            self.scheduler.add_request(request, is_held=bool(waits))
        if waits:
            self._held.hold(request.request_id, waits)

    def release_held(self) -> list[tuple[int, CbError]]:
        """Let requests start that have what they waited for; returns those that ended because it will not come."""
        refused = []
        for request_id, error in self._held.settled(self._clock()) if len(self._held) else ():
            if error is None:
                self.scheduler.release(request_id)
            elif self.cancel(request_id):
                refused.append((request_id, error))
        if self.adapters is not None:
            self.adapters.tidy(self.scheduler.adapters_in_use, self._clock())
        return refused

    @property
    def is_holding(self) -> bool:
        """Whether requests wait for something outside, as for their grammars."""
        return len(self._held) > 0

    def cancel(self, request_id: int) -> bool:
        """End a request; its blocks return once no launched step can touch them. False if it is not known."""
        self._held.forget(request_id)
        is_known = self.scheduler.cancel(request_id)
        if is_known:
            self.log.cancelled(request_id)
        return is_known

    def expire(self) -> list[tuple[int, str]]:
        """End requests whose timeout has passed: their ids, and what to tell their clients."""
        self.scheduler.set_time(self._clock())
        expired = self.scheduler.expire()
        for request_id, _ in expired:
            self._held.forget(request_id)
            self.log.cancelled(request_id)
        return expired

    @property
    def queue_room(self) -> QueueRoom:
        """What front ends are told of the queue."""
        return self.scheduler.queue_room

    def has_requests(self) -> bool:
        """Whether any request is waiting or running; steps that were launched for others may still come back."""
        return self.scheduler.num_running + self.scheduler.num_waiting > 0

    def check_runner(self) -> None:
        """Raises `GaveUpError` where a part of the runner is gone, so that no step can run any more."""
        lost = None if self._watched is None else self._watched.lost()
        if lost is not None:
            raise GaveUpError(lost)

    def has_unfinished(self) -> bool:
        return bool(self._launched) or self.scheduler.has_unfinished()

    def step(self) -> EngineOutput | None:
        """Launch what can be launched, then finish the oldest step. None when there was nothing to do.

        Raises `StepFailedError` when the runner raised; its output must be delivered like any other.
        """
        log, scheduler = self.log, self.scheduler
        log.begin()
        scheduler.set_time(self._clock())
        # A guided row waits for its last token before it samples: a deeper run-ahead would only delay results.
        run_ahead = min(self.run_ahead, 1) if scheduler.num_guided else self.run_ahead
        while len(self._launched) <= run_ahead:
            plan = scheduler.schedule()
            if plan is None:
                break
            log.launching(plan, scheduler.num_waiting, scheduler.num_free_blocks, scheduler.num_preemptions)
            try:
                reach("engine.execute")
                self._launch(plan)
            except Exception as error:
                self._guided.not_launched()
                raise self._failed(plan.step_id, error) from error
            log.launched()
        if not self._launched:
            log.idle()
            return None
        step = self._launched.popleft()
        log.waiting()
        try:
            reach("engine.result")
            # Nobody else asks for the result of a step without guides.
            result = step.pending.result() if step.fed is None else self._guided.read(step.fed, step.result())
        except Exception as error:
            if step.fed is not None:
                self._guided.lost(step.fed)
            raise self._failed(step.plan.step_id, error) from error
        log.arrived()
        scheduler.set_time(self._clock())
        output = scheduler.update_from_output(result)
        log.completed(result.step_id, output, self.has_unfinished())
        return output

    def _launch_timed(self, plan: StepPlan) -> None:
        self._launch_plan(plan)
        self.scheduler.launched(self._clock())

    def _launch_plan(self, plan: StepPlan) -> None:
        if plan.joined and self.scheduler.num_guided:
            for row in plan.joined:
                guide = self.scheduler.running(row.request_id).guide
                if guide is not None:
                    self._guided.join(row, cast(Guide, guide))
        step = LaunchedStep(plan, self.runner.execute(plan, self._guided))
        if self._guided.is_asked:
            step.fed = self._guided.launched(step)
        self._launched.append(step)

    def _failed(self, step_id: int, error: Exception) -> StepFailedError:
        output = self.scheduler.fail_step(step_id)
        self.log.completed(step_id, output, is_going_on=False)
        return StepFailedError(output, error)

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(
            stats := self.scheduler.stats(),
            steps=self.log.stats(),
            num_compiled_grammars=self.grammars.num_compiled,
            num_refused_grammars=self.grammars.num_refused,
            grammar_seconds=self.grammars.seconds,
            adapters=None if self.adapters is None else self.adapters.add_to(stats.adapters),
        )

    def close(self) -> None:
        self._launched.clear()
        self._guided.close()
        self.grammars.close()
        if self.adapters is not None:
            self.adapters.close()
        self.runner.close()


def _salt_bytes(salt: str) -> bytes:
    """Of one length, so that no salt can look like another one with a runner's key behind it."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=16).digest() if salt else b""


def create_engine(config: EngineConfig, folder: Path | None = None, weights: Path | None = None) -> LLMEngine:
    """Load the model and build the engine. `folder` and `weights` are as `choose_runner` has them. Raises `ConfigError`
    with a one-line reason and remedy."""
    factory = choose_runner(config, folder, weights)
    try:
        runner, info = factory(config)
    except MemoryError as error:
        raise ConfigError(
            f"not enough memory to start ({error}); lower max_num_seqs ({config.max_num_seqs}) or max_model_len, or use"
            " a smaller model or dtype"
        ) from None
    return LLMEngine(config, runner, info)
