"""Captured decode steps at launch parameters that are being tried: what the tuners in whole steps share.

Settings name what is launched with which parameters; a key has an `op` and a `when`, the conditions of the launches
that it stands for. What is searched, and what a step's time is, the tuners say (`tune_steps.py`,
`tune_attention_steps.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from bench_step import record, seat
from step_search import Search, Settings, Steps

from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.runner.step_buffers import StepBuffers
from cb_backend.kernels.compile_ahead import compile_ahead
from cb_backend.kernels.launch import overriding


@contextlib.contextmanager
def using(settings: Settings) -> Iterator[None]:
    """Launch what the settings name with their parameters meanwhile."""
    with contextlib.ExitStack() as stack:
        for key, parameters in settings.items():
            stack.enter_context(overriding(key.op, parameters, **key.when))
        yield


def search_until(end: float, steps: Steps, first: Settings) -> Search:
    """A search that begins at these settings, tells each trial at once and ends at a reading of `perf_counter`."""
    return Search(steps, first, lambda: time.perf_counter() > end, lambda line: print(line, flush=True))


class CapturedSteps:
    """The steps that are timed together, each of a runner whose slots hold requests of `lengths` tokens."""

    def __init__(self, steps: list[tuple[SlotRunner, StepBuffers]], lengths: list[int]) -> None:
        self.steps, self.lengths = steps, lengths

    def compile(self, many: list[Settings]) -> None:
        """Compile what steps at these settings launch, several processes at once."""
        torch.cuda.empty_cache()  # of the graphs before
        try:
            compile_ahead(lambda: self._rehearse(many))
        except (OSError, TimeoutError) as error:  # a process that died, or is late
            print(f"    {error}; the rest is compiled one by one", flush=True)

    def _rehearse(self, many: list[Settings]) -> None:
        for settings in many:
            with contextlib.suppress(Exception), using(settings):  # `make` raises it again
                for runner, buffers in self.steps:
                    runner.run_step(buffers)

    def make(self, settings: Settings) -> list[torch.cuda.CUDAGraph]:
        """A graph of each step. Raises where one cannot be launched so."""
        graphs = []
        with using(settings):
            for runner, buffers in self.steps:
                seat(runner, self.lengths)
                graphs.append(record(runner, buffers))
        return graphs

    def close(self) -> None:
        for runner in {id(runner): runner for runner, _ in self.steps}.values():
            runner.close()
