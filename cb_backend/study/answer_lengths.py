"""Ends answers where a replay wants them to end, on any model runner, without the scheduler knowing beforehand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.step import MaskSource, Pending, StepPlan, StepResult, Want
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.study.step_times import shape_of


@dataclass(frozen=True, slots=True)
class _Cut:
    """A launched step, some of whose rows are to sample the stop id."""

    inner: Pending
    is_end: NDArray[np.bool_]  # [num_rows]
    stop_id: int

    def result(self) -> StepResult:
        output = self.inner.result()
        is_stray = output.token_ids == self.stop_id  # sampled by chance
        if not (self.is_end.any() or is_stray.any()):
            return output
        token_ids = np.where(is_stray, np.int32(0), output.token_ids)
        token_ids[self.is_end] = self.stop_id
        return msgspec.structs.replace(output, token_ids=token_ids)


class AnswerLengths:
    """Stands in front of an engine's runner and ends each answer where the traffic wants it, by a stop token.

    So the scheduler does not know lengths beforehand, as in life. The runner is told of no stop ids: it must not end an
    answer at one that it samples by chance. Keeps each step's shape and launch time on the way.
    """

    def __init__(self, engine: LLMEngine, output_lens: Sequence[int], clock: Callable[[], float]) -> None:
        self._clock = clock
        self.stop_id = engine.info.vocab_size - 1
        self.shapes: list[tuple[float, ...]] = []
        self.launch_seconds: list[float] = []
        self._inner: Any = engine.runner
        self._output_lens = output_lens
        # By slot: the position whose token is the last.
        self._last = np.zeros(engine.scheduler.num_slots, np.int64)
        engine.runner = self

    def execute(self, plan: StepPlan, masks: MaskSource) -> _Cut:
        for row in plan.joined:
            self._last[row.slot] = row.num_prompt_tokens + self._output_lens[row.request_id] - 1
        self.shapes.append(shape_of(plan))
        is_end = (plan.wants == Want.TOKENS) & (plan.first + plan.num_tokens >= self._last[plan.slots])
        if plan.joined:
            joined = tuple(dataclasses.replace(row, stop_token_ids=()) for row in plan.joined)
            plan = msgspec.structs.replace(plan, joined=joined)
        begin = self._clock()
        pending = self._inner.execute(plan, masks)
        self.launch_seconds.append(self._clock() - begin)
        return _Cut(pending, is_end, self.stop_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
