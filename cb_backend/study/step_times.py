"""How long a step takes, fitted from measured steps and kept as a small JSON file.

Steps with and without prompt tokens have a law each: a level by the size of the step (in powers of two: devices run
padded shapes, so time goes up in stairs), plus so much a decode row, a token of their contexts, a prompt token, a pair
of a prompt token and one before it, and a prompt. It does not know schedulers or clocks; its cousin
`engine.scheduler.step_time_model` learns while serving and has to be right only about prompts.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.step import StepPlan
from cb_backend.engine.scheduler.step_time_model import non_negative_solution

FORMAT = 1
# Columns of a step's shape.
DECODE_ROWS, DECODE_CONTEXT, PROMPT_TOKENS, PROMPT_PAIRS, PROMPT_ROWS = range(5)
_MIN_SAMPLES = 8  # of a kind of step; fewer are fitted together with the other kind
_MIN_OF_A_SIZE = 3  # steps; the level of a size with fewer is taken from its neighbours
_ROUNDS = 12  # of the fit to the middle
_CLOSE = 0.01  # relative error below which a step pulls no harder
# A step is left out of the means if it is off by more than so many times the median, and by more than a factor.
_OUTLIER = 5.0
_NEVER_OUTLIER = math.log(1.25)

Floats = NDArray[np.float64]


def shape_of(plan: StepPlan) -> tuple[float, float, float, float, float]:
    """What the time of a step depends on: decode rows, the sum of their context tokens, prompt tokens, pairs of a
    prompt token and one before it, prompts."""
    decode = plan.num_decode_rows
    context = float(plan.first[:decode].sum(dtype=np.int64)) + decode
    if decode == plan.num_rows:
        return float(decode), context, 0.0, 0.0, 0.0
    scheduled = plan.num_tokens[decode:].astype(np.float64)
    pairs = float(np.dot(scheduled, plan.first[decode:] + scheduled / 2))
    return float(decode), context, float(scheduled.sum()), pairs, float(len(scheduled))


class Law(msgspec.Struct, frozen=True):
    """Seconds of one kind of step."""

    levels: list[float]  # of steps of size 1, 2, 3 to 4, 5 to 8, ...
    slopes: list[float]  # of the five columns of a shape

    def seconds(self, shape: tuple[float, ...]) -> float:
        s = self.slopes
        size_class, last = _size_class(shape), len(self.levels) - 1
        level = self.levels[min(size_class, last)]
        if size_class > last and shape[PROMPT_TOKENS]:
            level *= 2.0 ** (size_class - last)  # a guess beyond what was measured: in proportion to the prompt tokens
        return level + s[0] * shape[0] + s[1] * shape[1] + s[2] * shape[2] + s[3] * shape[3] + s[4] * shape[4]


def _size_class(shape: tuple[float, ...]) -> int:
    """The size of a step is its prompt tokens, or where it has none its rows: n is in class ceil(log2(n))."""
    return math.ceil(math.log2(max(shape[PROMPT_TOKENS] or shape[DECODE_ROWS], 1.0)))


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The fit, and what it was measured on. Fields that are not figures of the fit are filled by the caller."""

    format: int = FORMAT
    conditions: dict[str, str]  # card, driver, torch, commit, ...
    model: str
    dtype: str
    device: str
    tensor_parallel_size: int = 1  # GPUs that held the measured engine's model together
    run_ahead: int
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int  # of the cache that the measured engine had
    kv_windows: tuple[int, ...] = (0,)  # of its groups of layers, as `ModelInfo` has them
    max_num_seqs: int  # largest batch and budget that were measured: beyond them the fit only guesses
    max_num_batched_tokens: int
    num_steps: int
    relative_error: float  # median of |predicted - measured| / measured over the steps
    decode: Law
    mixed: Law

    def seconds(self, shape: tuple[float, ...]) -> float:
        """Predicted seconds of a step, from the end of the one before while the engine is busy."""
        return (self.mixed if shape[PROMPT_TOKENS] else self.decode).seconds(shape)

    def prompt_seconds(self, shape: tuple[float, ...]) -> float:
        """Of them, what the prompts in the step cost: the rest is what its decode rows alone would take."""
        if not shape[PROMPT_TOKENS]:
            return 0.0
        decode_alone = self.seconds((*shape[:PROMPT_TOKENS], 0.0, 0.0, 0.0)) if shape[DECODE_ROWS] else 0.0
        return max(self.seconds(shape) - decode_alone, 0.0)

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
        if any(len(law.slopes) != 5 or not law.levels for law in (times.decode, times.mixed)):
            raise ConfigError(f"{path} is damaged: a law of it has not five slopes and some levels; measure again")
        return times


def fit_laws(shapes: Floats, seconds: Floats) -> tuple[Law, Law, float]:
    """(decode, mixed, median relative error) from measured steps: `shapes` [num_steps, 5], `seconds` [num_steps].

    Raises `ConfigError` if there are too few steps to tell anything.
    """
    is_measured = seconds > 0
    shapes, seconds = shapes[is_measured], seconds[is_measured]
    if len(seconds) < _MIN_SAMPLES:
        raise ConfigError(f"only {len(seconds)} steps were measured; at least {_MIN_SAMPLES} are needed")
    is_mixed = shapes[:, PROMPT_TOKENS] > 0
    laws = []
    for kind in (~is_mixed, is_mixed):
        chosen = kind if np.count_nonzero(kind) >= _MIN_SAMPLES else np.ones_like(kind)
        laws.append(_fit(shapes[chosen], seconds[chosen]))
    rows = zip(shapes.tolist(), is_mixed.tolist(), strict=True)
    predicted = np.array([laws[mixed].seconds(tuple(shape)) for shape, mixed in rows])
    return laws[0], laws[1], float(np.median(np.abs(predicted - seconds) / seconds))


def _fit(shapes: Floats, seconds: Floats) -> Law:
    """The law of the usual steps, as means: first of the middle, which a third of pauses (of the host; of shapes that
    come for the first time) does not move, then least squares of the relative errors of what is near it."""
    design = _Design(shapes)
    weights = 1.0 / seconds
    for _ in range(_ROUNDS):  # the least sum of absolute errors, by weights of the round before
        predicted = design.predict(design.solve(seconds, weights))
        weights = 1.0 / predicted / np.sqrt(np.maximum(np.abs(seconds / predicted - 1.0), _CLOSE))
    spread = np.abs(np.log(seconds / predicted))
    is_usual = spread <= max(_OUTLIER * float(np.median(spread)), _NEVER_OUTLIER)
    coefficients = design.solve(seconds, is_usual / predicted)
    predicted = design.predict(coefficients)
    scale = float(seconds[is_usual].sum() / predicted[is_usual].sum())
    return design.law(scale * coefficients)


class _Design:
    """The equations of a fit: a column a size class of which enough steps were seen, and one a column of a shape."""

    def __init__(self, shapes: Floats) -> None:
        classes = np.array([_size_class(tuple(shape)) for shape in shapes.tolist()])
        self._num_classes = int(classes.max()) + 1
        counts = np.bincount(classes)
        seen = np.flatnonzero(counts >= _MIN_OF_A_SIZE)
        self._seen = seen if len(seen) else np.array([0])
        # A class that was hardly seen lends its steps to the levels between which it lies.
        levels = np.array([_all_levels(self._seen, one, self._num_classes) for one in np.eye(len(self._seen))])
        self._features = np.column_stack([levels.T[classes], shapes])

    def solve(self, seconds: Floats, weights: Floats) -> Floats:
        """The levels and slopes, none below zero, with the least sum of squared weighted errors."""
        features = self._features * weights[:, None]
        scale = np.linalg.norm(features, axis=0)
        scale[scale == 0] = 1.0
        features /= scale
        return non_negative_solution(features.T @ features, features.T @ (seconds * weights)) / scale

    def predict(self, coefficients: Floats) -> Floats:
        return np.maximum(self._features @ coefficients, 1e-9)

    def law(self, coefficients: Floats) -> Law:
        levels, slopes = coefficients[: len(self._seen)], coefficients[len(self._seen) :]
        return Law(_all_levels(self._seen, levels, self._num_classes).tolist(), slopes.tolist())


def _all_levels(seen: NDArray[np.int64], levels: Floats, count: int) -> Floats:
    """Levels of classes 0 to `count` - 1: between those that were seen in proportion to the size, else the nearest."""
    return np.interp(2.0 ** np.arange(count), 2.0**seen, levels)
