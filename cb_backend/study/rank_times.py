"""Step times of another number of GPUs than were measured: the measured time, and by how much a step becomes shorter.

What a step takes beside the arithmetic (launches, the host) is in the measured times, and does not become less by
sharing; what the arithmetic and the sums between the GPUs take is reckoned from sizes and data sheets. It is a
prediction from both, and no measurement.
"""

from __future__ import annotations

from cb_backend.study.gpu_plan import Rates, decode_step_seconds, prompt_seconds
from cb_backend.study.roofline import ModelShape
from cb_backend.study.step_times import DECODE_CONTEXT, DECODE_ROWS, PROMPT_TOKENS, StepTimes


class RankTimes(StepTimes, frozen=True, kw_only=True):
    """As if `tensor_parallel_size` GPUs had been measured."""

    measured_on: int  # GPUs that held the model together
    shape: ModelShape
    rates: Rates

    def seconds(self, shape: tuple[float, ...]) -> float:
        there, here = self._reckoned(shape, self.tensor_parallel_size), self._reckoned(shape, self.measured_on)
        return max(there, StepTimes.seconds(self, shape) + there - here)

    def _reckoned(self, shape: tuple[float, ...], num_ranks: int) -> float:
        num_rows, num_tokens, seconds = int(shape[DECODE_ROWS]), int(shape[PROMPT_TOKENS]), 0.0
        if num_rows:
            context = int(shape[DECODE_CONTEXT])
            seconds += decode_step_seconds(self.shape, self.rates, num_ranks, num_rows, context)
        if num_tokens:
            seconds += prompt_seconds(self.shape, self.rates, num_ranks, num_tokens)
        return seconds


def on_ranks(times: StepTimes, shape: ModelShape, rates: Rates, num_ranks: int, num_blocks: int) -> StepTimes:
    """As if `num_ranks` GPUs had held the model together, whose cache then has `num_blocks` blocks."""
    measured = {name: getattr(times, name) for name in StepTimes.__struct_fields__}
    changed = {"tensor_parallel_size": num_ranks, "num_blocks": num_blocks}
    return RankTimes(**{**measured, **changed}, measured_on=times.tensor_parallel_size, shape=shape, rates=rates)
