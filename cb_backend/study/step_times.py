"""How long a step takes, fitted from measured steps and kept as a small JSON file.

Steps with and without prompt tokens have a line each: seconds = a constant, plus so much a decode row, a token of
their contexts, a prompt token, a pair of prompt token and earlier token, and a prompt. Real steps are not that
straight (padded shapes, kernels that fill up), so each line is bent afterwards by what was left over, by the size of
the step in powers of two. It does not know schedulers or clocks; `engine.step_time` is its cousin that learns while
serving and has to be right only about prompts.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.engine.step_time import solve_non_negative
from cb_backend.errors import ConfigError
from cb_backend.outputs import SchedulerOutput

FORMAT = 1
# Columns of a step's shape.
DECODE_ROWS, DECODE_CONTEXT, PROMPT_TOKENS, PROMPT_PAIRS, PROMPT_ROWS = range(5)
_MIN_SAMPLES = 8  # of a kind of step; fewer are fitted together with the other kind
_MIN_IN_BUCKET = 3
_OUTLIER = 3.0  # times the fit, either way: such steps (a pause of the host) are left out of the second fit

Floats = NDArray[np.float64]


def shape_of(plan: SchedulerOutput) -> tuple[float, float, float, float, float]:
    """What the time of a step depends on: decode rows, the sum of their context tokens, prompt tokens, pairs of a
    prompt token and one before it, prompts."""
    decode = plan.num_decode_rows
    context = float(plan.num_computed_tokens[:decode].sum(dtype=np.int64)) + decode
    if decode == plan.num_rows:
        return float(decode), context, 0.0, 0.0, 0.0
    scheduled = plan.num_scheduled_tokens[decode:].astype(np.float64)
    pairs = float(np.dot(scheduled, plan.num_computed_tokens[decode:] + scheduled / 2))
    return float(decode), context, float(scheduled.sum()), pairs, float(len(scheduled))


class Line(msgspec.Struct, frozen=True):
    """Seconds of one kind of step."""

    coefficients: list[float]  # of the constant and the five columns of a shape
    bends: list[float]  # factor for steps of 1, 2, 4, 8, ... tokens; in between it is interpolated

    def seconds(self, shape: tuple[float, ...]) -> float:
        c = self.coefficients
        straight = c[0] + c[1] * shape[0] + c[2] * shape[1] + c[3] * shape[2] + c[4] * shape[3] + c[5] * shape[4]
        place = min(math.log2(max(shape[DECODE_ROWS] + shape[PROMPT_TOKENS], 1.0)), len(self.bends) - 1)
        low = min(int(place), len(self.bends) - 2)
        return straight * (self.bends[low] + (place - low) * (self.bends[low + 1] - self.bends[low]))


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The fit, and what it was measured on. Fields that are not figures of the fit are filled by the caller."""

    format: int = FORMAT
    conditions: dict[str, str]  # card, driver, torch, commit, ...
    model: str
    dtype: str
    device: str
    run_ahead: int
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int  # of the cache that the measured engine had
    max_num_seqs: int  # largest batch and budget that were measured: beyond them the fit only guesses
    max_num_batched_tokens: int
    num_steps: int
    relative_error: float  # median of |predicted - measured| / measured over the steps
    decode: Line
    mixed: Line

    def seconds(self, shape: tuple[float, ...]) -> float:
        """Predicted seconds of a step, from the end of the one before while the engine is busy."""
        return (self.mixed if shape[PROMPT_TOKENS] else self.decode).seconds(shape)

    def prompt_seconds(self, shape: tuple[float, ...]) -> float:
        """Of them, what the prompts in the step cost: the rest is what its decode rows alone would take."""
        if not shape[PROMPT_TOKENS]:
            return 0.0
        decode_alone = self.decode.seconds((*shape[:PROMPT_TOKENS], 0.0, 0.0, 0.0)) if shape[DECODE_ROWS] else 0.0
        return max(self.mixed.seconds(shape) - decode_alone, 0.0)

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def load(cls, path: Path) -> StepTimes:
        """Raises `ConfigError` with the reason."""
        try:
            times = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"the step times {path} cannot be read: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{path} holds no step times ({error}); measure them: cb-backend study --save-times"
            ) from None
        if times.format != FORMAT:
            raise ConfigError(f"{path} has format {times.format}, known is {FORMAT}; measure again: cb-backend study")
        if any(len(line.coefficients) != 6 or len(line.bends) < 2 for line in (times.decode, times.mixed)):
            raise ConfigError(f"{path} is damaged: a line of it has not six coefficients; measure again")
        return times


def fit_lines(shapes: Floats, seconds: Floats) -> tuple[Line, Line, float]:
    """(decode, mixed, median relative error) from measured steps: `shapes` [num_steps, 5], `seconds` [num_steps].

    Raises `ConfigError` if there are too few steps to tell anything.
    """
    is_measured = seconds > 0
    shapes, seconds = shapes[is_measured], seconds[is_measured]
    if len(seconds) < _MIN_SAMPLES:
        raise ConfigError(f"only {len(seconds)} steps were measured; at least {_MIN_SAMPLES} are needed")
    is_mixed = shapes[:, PROMPT_TOKENS] > 0
    lines = []
    for kind in (~is_mixed, is_mixed):
        chosen = kind if np.count_nonzero(kind) >= _MIN_SAMPLES else np.ones_like(kind)
        lines.append(_fit(shapes[chosen], seconds[chosen]))
    predicted = np.array(
        [lines[int(mixed)].seconds(tuple(shape)) for mixed, shape in zip(is_mixed, shapes.tolist(), strict=True)]
    )
    return lines[0], lines[1], float(np.median(np.abs(predicted - seconds) / seconds))


def _fit(shapes: Floats, seconds: Floats) -> Line:
    coefficients = _solve(shapes, seconds)
    ratio = seconds / np.maximum(_straight(shapes, coefficients), 1e-9)
    usual = (ratio < _OUTLIER) & (ratio > 1 / _OUTLIER)
    if np.count_nonzero(usual) >= _MIN_SAMPLES:
        shapes, seconds = shapes[usual], seconds[usual]
        coefficients = _solve(shapes, seconds)
    return Line(coefficients.tolist(), _bends(shapes, seconds, _straight(shapes, coefficients)))


def _straight(shapes: Floats, coefficients: Floats) -> Floats:
    return coefficients[0] + shapes @ coefficients[1:]


def _solve(shapes: Floats, seconds: Floats) -> Floats:
    """Least squares of the relative error, no coefficient below zero."""
    features = np.column_stack([np.ones(len(shapes)), shapes]) / seconds[:, None]
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    features /= scale
    return solve_non_negative(features.T @ features, features.sum(0)) / scale


def _bends(shapes: Floats, seconds: Floats, straight: Floats) -> list[float]:
    """Measured over fitted time by size; where a size was not seen, that of the nearest one that was."""
    place = np.rint(np.log2(np.maximum(shapes[:, DECODE_ROWS] + shapes[:, PROMPT_TOKENS], 1.0))).astype(int)
    count = max(int(place.max()) + 1, 2)
    known = {
        size: float(seconds[place == size].sum() / straight[place == size].sum())
        for size in range(count)
        if np.count_nonzero(place == size) >= _MIN_IN_BUCKET
    }
    if not known:
        return [float(seconds.sum() / straight.sum())] * 2
    return [known[min(known, key=lambda other: (abs(other - size), other))] for size in range(count)]
