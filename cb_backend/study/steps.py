"""A log of what the engine did in each step and how long the host took, written from outside by wrapping three calls.

`schedule`, `execute` and `update_from_output` are timed where the engine calls them; the engine does not know.
Waiting for the device happens in none of the three, so on a GPU their sum is the host's time for a step (a runner on
the CPU computes inside `execute`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.step import EngineOutput, MaskSource, Pending, StepPlan, StepResult, Want
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.study.latencies import summary
from cb_backend.study.roofline import CardLimits, ModelShape, step_seconds

ROWS_OF_KIND = 32  # decode steps are told apart by these
FULL_BATCH = 0.9  # a decode step counts as full from this share of the largest batch of the pass


@dataclass(slots=True)
class StepRecord:
    """One executed step. Times in seconds of host work."""

    num_decode_rows: int
    num_computed_tokens: NDArray[np.int32]  # [num_rows] before the step
    num_scheduled_tokens: NDArray[np.int32]  # [num_rows]
    num_sampling_rows: int
    schedule_time: float
    execute_time: float = 0.0
    update_time: float = 0.0
    end: float = 0.0  # perf_counter when the step's result had been processed; 0 = never

    @property
    def num_rows(self) -> int:
        return len(self.num_scheduled_tokens)

    @property
    def is_decode(self) -> bool:
        return self.num_decode_rows == self.num_rows

    @property
    def host_time(self) -> float:
        return self.schedule_time + self.execute_time + self.update_time

    @property
    def kind(self) -> str:
        """Steps of one kind cost about the same."""
        if self.is_decode:
            return f"decode, to {-(-self.num_rows // ROWS_OF_KIND) * ROWS_OF_KIND:4d} rows"
        num_prompt_tokens = int(self.num_scheduled_tokens[self.num_decode_rows :].sum())
        return f"prompts, to {1 << (num_prompt_tokens - 1).bit_length():5d} tokens"


@dataclass(slots=True)
class StepLog:
    """Steps by their id, in the order of their launch."""

    steps: dict[int, StepRecord] = field(default_factory=dict)

    def full_decode_steps(self) -> list[StepRecord]:
        largest = max((step.num_rows for step in self.steps.values()), default=0)
        return [step for step in self.steps.values() if step.is_decode and step.num_rows >= FULL_BATCH * largest]

    def host_summary(self) -> dict[str, dict[str, float] | None]:
        """Microseconds by call, and their sum, over the full decode steps."""
        full = self.full_decode_steps()
        parts = {
            "schedule": np.array([step.schedule_time for step in full]),
            "execute": np.array([step.execute_time for step in full]),
            "update_from_output": np.array([step.update_time for step in full]),
        }
        parts["total"] = np.sum(list(parts.values()), axis=0)
        return {name: summary(times, 1e6) for name, times in parts.items()}

    def step_intervals(self) -> NDArray[np.float64]:
        """Seconds from one step's result to the next's, for neighbouring full decode steps."""
        full = {id(step) for step in self.full_decode_steps()}
        steps = list(self.steps.values())
        pairs = itertools.pairwise(steps)
        return np.array([after.end - before.end for before, after in pairs if {id(before), id(after)} <= full])

    def by_kind(self, began: float) -> dict[str, list[tuple[StepRecord, float]]]:
        """Steps of each kind, with the seconds since the result of the step before (of the first: since `began`)."""
        kinds: dict[str, list[tuple[StepRecord, float]]] = {}
        for step in self.steps.values():
            kinds.setdefault(step.kind, []).append((step, step.end - began))
            began = step.end
        return dict(sorted(kinds.items()))

    def num_recomputed_tokens(self, num_tokens: int) -> int:
        """Tokens computed beyond the `num_tokens` that the work needs, once each: those of preempted requests.

        Less what these found in the prefix cache because another request had computed it meanwhile.
        """
        computed = sum(int(step.num_scheduled_tokens.sum()) for step in self.steps.values())
        return max(0, computed - num_tokens)

    def padding_share(self, runner: Any) -> float | None:
        """Padding's share of all tokens (prompts' and decode rows') that steps ran with; None without graphs.

        `runner` is asked which graph holds each step, as it asks itself; a step with none is as large as its plan.
        """
        graphs = getattr(runner, "graphs", None)
        if graphs is None or not graphs.shapes:
            return None
        num_needed = num_run = 0
        for step in self.steps.values():
            num_tokens, decode = int(step.num_scheduled_tokens.sum()), step.num_decode_rows
            found = graphs.find(decode, num_tokens - decode, step.num_rows - decode)
            num_needed += num_tokens
            num_run += num_tokens if found is None else found[1].shape.num_tokens
        return 1 - num_needed / num_run if num_run else None

    def floor_seconds(self, shape: ModelShape, card: CardLimits, steps: Sequence[StepRecord] | None = None) -> float:
        """The least time the card needs for the steps that ran (all of them, or the given ones)."""
        return sum(_floor(step, shape, card) for step in (self.steps.values() if steps is None else steps))


def _floor(step: StepRecord, shape: ModelShape, card: CardLimits) -> float:
    decode = step.num_decode_rows
    computed = step.num_computed_tokens.astype(np.int64)
    scheduled = step.num_scheduled_tokens.astype(np.int64)
    chunks, earlier = scheduled[decode:], computed[decode:]
    return step_seconds(
        shape,
        card,
        num_tokens=int(scheduled.sum()),
        num_sampling_rows=step.num_sampling_rows,
        num_read_tokens=shape.tokens_read(computed[:decode] + 1) + shape.tokens_read(earlier),
        num_attention_pairs=shape.attention_pairs(earlier, chunks),
    )


class _SchedulerProbe:
    """Stands in front of the scheduler and times two of its calls."""

    def __init__(self, inner: Any, log: StepLog) -> None:
        self._inner = inner
        self._log = log

    def schedule(self) -> StepPlan | None:
        start = time.perf_counter()
        plan: StepPlan | None = self._inner.schedule()
        took = time.perf_counter() - start
        if plan is not None:
            self._log.steps[plan.step_id] = StepRecord(
                plan.num_decode_rows,
                plan.first.copy(),
                plan.num_tokens.copy(),
                int(np.count_nonzero(plan.wants == Want.TOKENS)),
                took,
            )
        return plan

    def update_from_output(self, result: StepResult) -> EngineOutput:
        start = time.perf_counter()
        output: EngineOutput = self._inner.update_from_output(result)
        record = self._log.steps[result.step_id]
        record.end = time.perf_counter()
        record.update_time = record.end - start
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _RunnerProbe:
    """Stands in front of the runner and times the launch."""

    def __init__(self, inner: Any, log: StepLog) -> None:
        self._inner = inner
        self._log = log

    def execute(self, plan: StepPlan, masks: MaskSource) -> Pending:
        start = time.perf_counter()
        pending: Pending = self._inner.execute(plan, masks)
        self._log.steps[plan.step_id].execute_time = time.perf_counter() - start
        return pending

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def watch(engine: LLMEngine) -> StepLog:
    """Log every step of this engine from now on. The engine keeps the probes; make a fresh one for each pass."""
    log = StepLog()
    wrapped: Any = engine
    wrapped.scheduler = _SchedulerProbe(engine.scheduler, log)
    wrapped.runner = _RunnerProbe(engine.runner, log)
    return log
