"""Fits of step times to steps whose law is known: pytest tests/study/test_step_times.py"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.step import StepPlan
from cb_backend.study.step_times import StepTimes, fit_laws, shape_of
from tests.study.made_up import step_times


def random_shapes(count: int, with_prompts: bool, seed: int = 0) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 200, count)
    context = rows * rng.integers(100, 2000, count)
    prompts = rng.integers(1, 8, count) * with_prompts
    tokens = prompts * rng.integers(16, 512, count)
    return np.column_stack([rows, context, tokens, tokens * rng.integers(50, 1000, count), prompts]).astype(float)


def line_seconds(shapes: NDArray[np.float64], *coefficients: float) -> NDArray[np.float64]:
    return coefficients[0] + shapes @ np.array(coefficients[1:])


def test_straight_laws_are_found_again() -> None:
    """Decode and mixed steps of laws of their own: each is predicted within a percent."""
    decode, mixed = random_shapes(300, False), random_shapes(300, True, seed=1)
    decode_s = line_seconds(decode, 1e-3, 5e-6, 1e-8, 0, 0, 0)
    mixed_s = line_seconds(mixed, 2e-3, 8e-6, 1e-8, 2e-6, 1e-10, 1e-4)
    lines = fit_laws(np.concatenate([decode, mixed]), np.concatenate([decode_s, mixed_s]))
    assert lines[2] < 0.01
    times = step_times(decode=lines[0], mixed=lines[1])
    new_decode, new_mixed = random_shapes(50, False, seed=2), random_shapes(50, True, seed=3)
    for shapes, law in (
        (new_decode, line_seconds(new_decode, 1e-3, 5e-6, 1e-8, 0, 0, 0)),
        (new_mixed, line_seconds(new_mixed, 2e-3, 8e-6, 1e-8, 2e-6, 1e-10, 1e-4)),
    ):
        predicted = [times.seconds(tuple(shape)) for shape in shapes.tolist()]
        assert predicted == pytest.approx(law.tolist(), rel=0.01)


def test_a_law_that_is_not_straight_is_bent() -> None:
    """Flat to 64 rows, then four times as steep as a line could be: sums stay within 3 %, also of each half."""
    shapes = random_shapes(2000, False)
    seconds = 1e-3 + 2e-5 * np.maximum(shapes[:, 0] - 64, 0)
    decode, _, _ = fit_laws(shapes, seconds)
    predicted = np.array([decode.seconds(tuple(shape)) for shape in shapes.tolist()])
    for half in (shapes[:, 0] < 64, shapes[:, 0] > 64):
        assert predicted[half].sum() == pytest.approx(seconds[half].sum(), rel=0.03)


def test_pauses_of_the_host_do_not_bend_the_fit() -> None:
    shapes = random_shapes(400, False)
    seconds = line_seconds(shapes, 1e-3, 5e-6, 0, 0, 0, 0)
    seconds[::50] *= 40
    decode, _, error = fit_laws(shapes, seconds)
    assert error < 0.05
    assert decode.seconds((100.0, 0.0, 0.0, 0.0, 0.0)) == pytest.approx(1.5e-3, rel=0.1)


def test_a_third_of_slow_steps_does_not_bend_the_fit() -> None:
    """As when shapes come for the first time: every third step takes 1.6 to 2.8 times as long."""
    rng = np.random.default_rng(0)
    for has_prompts in (False, True):
        shapes = random_shapes(600, has_prompts)
        usual = line_seconds(shapes, 1e-3, 5e-6, 1e-8, 2e-6, 0, 0)
        seconds = usual * rng.normal(1.0, 0.03, len(usual))
        seconds[::3] *= rng.uniform(1.6, 2.8, len(seconds[::3]))
        law = fit_laws(shapes, seconds)[int(has_prompts)]
        predicted = np.array([law.seconds(tuple(shape)) for shape in shapes.tolist()])
        assert predicted.sum() == pytest.approx(usual.sum(), rel=0.02)
        assert np.percentile(np.abs(predicted / usual - 1), 95) < 0.05


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="only 3 steps were measured"):
        fit_laws(random_shapes(3, False), np.ones(3))


def test_the_shape_of_a_plan() -> None:
    """Two decode rows after 10 and 20 tokens; chunks of 4 after 0 and of 6 after 8."""
    plan = StepPlan(
        1,
        np.arange(4, dtype=np.int32),
        np.array([10, 20, 0, 8], np.int32),
        np.array([1, 1, 4, 6], np.int32),
        np.array([1, 1, 1, 0], np.uint8),
        2,
    )
    # Contexts with the row's own token; pairs 4 * (0 + 2) and 6 * (8 + 3).
    assert shape_of(plan) == (2, 32, 10, 8 + 66, 2)


def test_step_times_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    step_times().save(path)
    assert StepTimes.load(path) == step_times()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{}", "holds no step times"), ("nonsense", "holds no step times"), (None, "cannot be read")],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str | None, complaint: str) -> None:
    path = tmp_path / "times.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        StepTimes.load(path)


def test_a_file_of_another_format_or_with_missing_figures_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    step_times(format=99).save(path)
    with pytest.raises(ConfigError, match="format 99, known is 1"):
        StepTimes.load(path)
    decode = step_times().decode
    step_times(decode=type(decode)(decode.levels, decode.slopes[:3])).save(path)
    with pytest.raises(ConfigError, match="has not five slopes"):
        StepTimes.load(path)
