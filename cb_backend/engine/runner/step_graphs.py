"""CUDA graphs of whole steps (inputs, layers, sampling, state), one a shape, each a single launch.

A graph reads the batch from the slot state through a list of slots, so the host's part of a steady decode step is one
launch. Shapes are buckets: a plan runs in the smallest that holds it, the rest is padding. All graphs share one memory
pool and are captured largest first, so that the pool is sized once.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import Any, Protocol

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
        # (num_tokens, shape), ascending, by (whether there are prompts, whether rows may go through adapters).
        self._shapes: dict[tuple[bool, bool], list[tuple[int, StepShape]]] = {}

    def capture(
        self,
        shapes: Iterable[StepShape],
        make: Callable[[StepShape], StepBuffers],
        step: Callable[[StepBuffers], object],
        rehearse: Callable[[StepBuffers], object],
        progress: Callable[[str], None],
        *,
        beside_threads: bool = False,
    ) -> None:
        """Capture `step` for every shape. The step must be runnable on buffers of padding and must not wait;
        `rehearse` runs before it and launches all its kernels. beside_threads: others of the process look at the device
        meanwhile, as a library does that watches what it has launched.
        """
        order = sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)
        start = time.perf_counter()
        pool = None
        options: dict[str, Any] = {"capture_error_mode": "thread_local"} if beside_threads else {}
        for done, shape in enumerate(order):
            buffers = make(shape)
            rehearse(buffers)  # compiles kernels and sets up library handles outside the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, **options):
                step(buffers)
            pool = graph.pool()
            self.add(shape, graph, buffers)
            if (done + 1) % 16 == 0 or done + 1 == len(order):
                progress(f"capturing CUDA graphs: {done + 1}/{len(order)} ({time.perf_counter() - start:.1f} s)")

    def add(self, shape: StepShape, graph: Replayable, buffers: StepBuffers) -> None:
        """Register what replays `shape` on `buffers`."""
        self._graphs[shape] = (graph, buffers)
        family = bool(shape.num_prefill), shape.has_adapters
        insort(self._shapes.setdefault(family, []), (shape.num_tokens, shape))

    @property
    def shapes(self) -> list[StepShape]:
        return [buffers.shape for _, buffers in self._graphs.values()]

    def find(
        self, num_decode: int, num_prefill: int, num_prompts: int, has_adapters: bool = False
    ) -> tuple[Replayable, StepBuffers] | None:
        """The graph with the fewest tokens of those that hold a step and are worth it; None if there is none.

        A step without adapters never runs in a graph of steps with them, nor the other way round.
        """
        shapes = self._shapes.get((num_prefill > 0, has_adapters), [])
        num_tokens = num_decode + num_prefill
        for _, shape in shapes[bisect_left(shapes, (num_tokens,)) :]:
            is_held = (
                num_decode <= shape.num_decode and num_prefill <= shape.num_prefill and num_prompts <= shape.num_prompts
            )
            if is_held and num_tokens >= shape.least_tokens:
                return self._graphs[shape]
        return None

    def clear(self) -> None:
        self._graphs.clear()
        self._shapes.clear()
