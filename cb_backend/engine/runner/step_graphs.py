"""CUDA graphs of whole steps (inputs, layers, sampling, state), one a shape, each a single launch.

A graph reads the batch from the slot state through a list of slots, so the host's part of a steady decode step is one
launch. Shapes are buckets: a plan runs in the smallest that holds it, the rest is padding. All graphs share one memory
pool and are captured largest first, so that the pool is sized once.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from cb_backend.engine.runner.step_buffers import StepBuffers
from cb_backend.engine.step_shapes import StepShape


class Replayable(Protocol):
    """A `torch.cuda.CUDAGraph`, or what stands in for one where there is no GPU."""

    def replay(self) -> None: ...


class StepGraphs:
    """The captured graphs, by shape."""

    def __init__(self) -> None:
        self._graphs: dict[StepShape, tuple[Replayable, StepBuffers]] = {}
        self._decode_sizes: dict[int, list[int]] = {}  # num_prefill -> decode sizes, ascending
        self._num_prompts: dict[int, int] = {}
        self._prefill_sizes: list[int] = []

    def capture(
        self,
        shapes: Iterable[StepShape],
        make: Callable[[StepShape], StepBuffers],
        step: Callable[[StepBuffers], object],
        progress: Callable[[str], None],
    ) -> None:
        """Capture `step` for every shape. The step must be runnable on buffers of padding and must not wait."""
        order = sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)
        start = time.perf_counter()
        pool = None
        for done, shape in enumerate(order):
            buffers = make(shape)
            step(buffers)  # compiles kernels and sets up library handles outside the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                step(buffers)
            pool = graph.pool()
            self.add(shape, graph, buffers)
            if (done + 1) % 16 == 0 or done + 1 == len(order):
                progress(f"capturing CUDA graphs: {done + 1}/{len(order)} ({time.perf_counter() - start:.1f} s)")

    def add(self, shape: StepShape, graph: Replayable, buffers: StepBuffers) -> None:
        """Register what replays `shape` on `buffers`."""
        self._graphs[shape] = (graph, buffers)
        insort(self._decode_sizes.setdefault(shape.num_prefill, []), shape.num_decode)
        self._num_prompts[shape.num_prefill] = shape.num_prompts
        self._prefill_sizes = sorted(self._num_prompts)

    @property
    def shapes(self) -> list[StepShape]:
        return list(self._graphs)

    def find(self, num_decode: int, num_prefill: int, num_prompts: int) -> tuple[Replayable, StepBuffers] | None:
        """The smallest graph that holds a step; None if there is none."""
        for size in self._prefill_sizes[bisect_left(self._prefill_sizes, num_prefill) :]:
            if num_prompts > self._num_prompts[size]:
                continue
            decode_sizes = self._decode_sizes[size]
            index = bisect_left(decode_sizes, num_decode)
            if index < len(decode_sizes):
                return self._graphs[StepShape(decode_sizes[index], size, self._num_prompts[size])]
        return None

    def clear(self) -> None:
        self._graphs.clear()
        self._prefill_sizes.clear()
