"""Step times of several GPUs from those of one: what is shared becomes shorter, what is not stays."""

from __future__ import annotations

import pytest

from cb_backend.study.gpu_plan import decode_step_seconds, prompt_seconds
from cb_backend.study.rank_times import on_ranks
from tests.study.made_up import step_times
from tests.study.test_gpu_plan import RATES, SHAPE

DECODE, PROMPT = (32.0, 32_000.0, 0.0, 0.0, 0.0), (0.0, 0.0, 512.0, 0.0, 1.0)


@pytest.mark.parametrize("shape", [DECODE, PROMPT])
def test_a_step_is_shorter_by_what_is_reckoned(shape: tuple[float, ...]) -> None:
    one = step_times()
    four = on_ranks(one, SHAPE, RATES, 4, 5000)

    def reckoned(num_ranks: int) -> float:
        if shape[0]:
            return decode_step_seconds(SHAPE, RATES, num_ranks, int(shape[0]), int(shape[1]))
        return prompt_seconds(SHAPE, RATES, num_ranks, int(shape[2]))

    assert four.seconds(shape) < one.seconds(shape)
    assert one.seconds(shape) - four.seconds(shape) == pytest.approx(reckoned(1) - reckoned(4))
    assert (four.tensor_parallel_size, four.num_blocks) == (4, 5000)


def test_no_step_is_shorter_than_what_is_reckoned_for_it() -> None:
    """Measured times that are below the data sheet's are of another card: nothing becomes free by that."""
    fast = step_times(decode=step_times().decode.__class__([1e-6], [0.0] * 5))
    four = on_ranks(fast, SHAPE, RATES, 4, 1)
    assert four.seconds(DECODE) == decode_step_seconds(SHAPE, RATES, 4, 32, 32_000)


def test_prompts_beside_streams_cost_what_they_add() -> None:
    both = (*DECODE[:2], *PROMPT[2:])
    four = on_ranks(step_times(), SHAPE, RATES, 4, 1)
    assert four.prompt_seconds(both) == pytest.approx(four.seconds(both) - four.seconds(DECODE))
    assert four.prompt_seconds(DECODE) == 0.0
