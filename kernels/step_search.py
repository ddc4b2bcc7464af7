"""The search of `tune_steps.py`: which launch parameters of its products make a whole step fastest.

Coordinate descent: each product's parameters are tried with all others at their best so far. Steps of the candidates
are timed in turn, and the fastest takes the place of the best so far if it gains more than noise, twice. Knows no GPU:
steps come from whoever asks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from linear_shapes import Parameters, Shape

Settings = dict[Any, Parameters]  # of every product (`Shape`) of a step, or of what else is searched
LEAST_GAIN = 0.0015  # share of a step: less is noise
ROUNDS, CONFIRMING_ROUNDS = 3, 8


class Steps(Protocol):
    """Where the search's times come from."""

    def compile(self, many: list[Settings]) -> None:
        """Prepare to make steps at these settings. What cannot be launched is left to `make`."""

    def make(self, settings: Settings) -> Any:
        """A step whose products are launched so. Raises where they cannot be: too much shared memory, for one."""

    def milliseconds(self, step: Any) -> float: ...


@dataclass
class Search:
    """Where the descent is: the best settings so far, and what was tried."""

    steps: Steps
    best: Settings
    is_over: Callable[[], bool]  # a trial of several settings that has begun is finished
    tell: Callable[[str], None] = print
    tried: set[Shape] = field(default_factory=set)  # products of which all was tried

    def run(self, tiles: dict[Shape, list[Parameters]], prefetches: tuple[int, ...]) -> None:
        """Each product's tiles, then its prefetches, over and over until nothing gains or time is over.

        All prefetches at once go first: they take memory bandwidth from each other, so one alone tells little.
        """
        everywhere = [{shape: prefetching(use, p) for shape, use in self.best.items()} for p in prefetches]
        has_time = self.choose("prefetches of all", everywhere)
        before: Settings | None = None
        while has_time and before != self.best:
            before = self.best
            for shape, many in tiles.items():
                prefetched = self.best[shape].get("prefetch", 0)
                has_time = self.choose(shape.name, [{shape: prefetching(tile, prefetched)} for tile in many])
                has_time = has_time and self.choose(
                    shape.name, [{shape: prefetching(self.best[shape], p)} for p in prefetches]
                )
                if not has_time:
                    return
                self.tried.add(shape)

    def choose(self, title: str, changes: list[Settings]) -> bool:
        """Try each change of the best so far and keep the fastest, if it gains. False where no time is left for it."""
        if self.is_over():
            self.tell(f"  {title}: no time left")
            return False
        many = [self.best]
        for change in changes:
            settings = {**self.best, **change}
            if settings not in many:
                many.append(settings)
        if len(many) == 1:
            return True
        made = self.make_all(many)
        times = self.times(made, ROUNDS)
        fastest = min(range(len(many)), key=times.__getitem__)
        kept = ""
        if gains(times[0], times[fastest]):
            now, then = self.times([made[0], made[fastest]], CONFIRMING_ROUNDS)
            if gains(now, then):
                kept = f"{told(many[fastest], self.best)}, again {now:.4f} and {then:.4f}"
        tries = " | ".join(
            f"{told(settings, self.best)} {ms:.4f}"
            for settings, ms in zip(many[1:], times[1:], strict=True)
            if ms < math.inf
        )
        self.tell(f"  {title}: now {times[0]:.4f}; {tries} -> {kept or 'stays'}")
        if kept:
            self.best = many[fastest]
        return True

    def make_all(self, many: list[Settings]) -> list[Any]:
        """A step of each; None, and reported, where it fails."""
        self.steps.compile(many)
        made = []
        for settings in many:
            try:
                made.append(self.steps.make(settings))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                self.tell(f"    left out {told(settings, self.best) or 'what is used now'}: {reason}")
                made.append(None)
        return made

    def times(self, made: list[Any], rounds: int) -> list[float]:
        """Milliseconds of each step, the median of rounds in which all take turns; infinite for None."""
        found: list[list[float]] = [[] for _ in made]
        for _ in range(rounds):
            for step, times in zip(made, found, strict=True):
                times.append(math.inf if step is None else self.steps.milliseconds(step))
        return [statistics.median(times) for times in found]


def gains(now: float, then: float) -> bool:
    return then < (1 - LEAST_GAIN) * now


def prefetching(parameters: Parameters, elements: int) -> Parameters:
    """With a prefetch of so many elements a row of weights; a library's product has none."""
    bare = {name: value for name, value in parameters.items() if name != "prefetch"}
    return bare | {"prefetch": elements} if elements and "library" not in bare else bare


def told(settings: Settings, other: Settings) -> str:
    """The parameters in which `settings` are not as the other."""
    return ", ".join(dict.fromkeys(short(use) for shape, use in settings.items() if use != other[shape]))


def short(parameters: Parameters) -> str:
    if "library" in parameters:
        return "cuBLASLt" if parameters["library"] == 2 else "cuBLAS"
    sizes = (parameters.get(name) for name in ("block_n", "block_k", "num_warps", "num_stages"))
    tile = "x".join(str(size) for size in sizes if size is not None)
    if "min_split" in parameters:  # decode attention's
        merged = f" by {parameters['merged']}" if "merged" in parameters else ""
        return f"{tile}/{parameters['ctas_per_sm']} of {parameters['min_split']}{merged}"
    kinds = "".join(f" {kind}" for kind in ("norm", "fold") if kind in parameters)
    return f"{tile}/{parameters.get('splits', 1)}+{parameters.get('prefetch', 0)}{kinds}"
