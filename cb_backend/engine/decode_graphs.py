"""One CUDA graph a batch size: a whole decode step (inputs, layers, sampling, state) as a single launch.

A graph reads the batch from the device state through a list of slots, so the host's part of a steady step is one
launch. Sizes are buckets: a batch runs in the smallest that holds it, the rest are rows of padding. All graphs share
one memory pool and are captured largest first, so that the pool is sized once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cb_backend.kernels.step_state import DecodeInputs, empty_decode_inputs


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes with a graph of their own, ascending: fine where a row more is felt, coarse where it is not."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, max_num_seqs + 32, 32)]
    below = [size for size in sizes if size < max_num_seqs]
    return [*below, max_num_seqs]


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Fixed device memory of one bucket. `host` is one array, so that one copy brings a step's changes."""

    host: Tensor  # int32 [num_rows + 3 * num_deltas]: slots, then deltas
    slots: Tensor  # int32 [num_rows] view
    deltas: Tensor  # int32 [num_deltas, 3] view of (slot, index, block_id), slot -1 = none
    inputs: DecodeInputs
    result: Tensor  # int32 [2, num_rows]: sampled token ids, is_failed


def make_buffers(num_rows: int, padding_slot: int, device: torch.device) -> StepBuffers:
    """Buffers for a step of up to `num_rows` rows and as many new blocks; they start as padding."""
    num_deltas = max(num_rows, 16)
    host = torch.full((num_rows + 3 * num_deltas,), -1, dtype=torch.int32, device=device)
    host[:num_rows] = padding_slot
    return StepBuffers(
        host=host,
        slots=host[:num_rows],
        deltas=host[num_rows:].view(num_deltas, 3),
        inputs=empty_decode_inputs(num_rows, device),
        result=torch.zeros(2, num_rows, dtype=torch.int32, device=device),
    )


class DecodeGraphs:
    """The captured graphs, by bucket."""

    def __init__(self) -> None:
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, StepBuffers]] = {}
        self._sizes: list[int] = []

    def capture(
        self,
        sizes: Iterable[int],
        make: Callable[[int], StepBuffers],
        step: Callable[[StepBuffers], None],
        progress: Callable[[str], None],
    ) -> None:
        """Capture `step` for every size. The step must be runnable on buffers of padding and must not wait."""
        order = sorted(sizes, reverse=True)
        start = time.perf_counter()
        pool = None
        for done, size in enumerate(order):
            buffers = make(size)
            step(buffers)  # compiles kernels and sets up library handles outside the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                step(buffers)
            pool = graph.pool()
            self._graphs[size] = (graph, buffers)
            if (done + 1) % 8 == 0 or done + 1 == len(order):
                progress(f"capturing CUDA graphs: {done + 1}/{len(order)} ({time.perf_counter() - start:.1f} s)")
        self._sizes = sorted(self._graphs)

    def find(self, num_rows: int) -> tuple[torch.cuda.CUDAGraph, StepBuffers] | None:
        """The smallest graph that holds `num_rows` rows; None if there is none."""
        for size in self._sizes:
            if size >= num_rows:
                return self._graphs[size]
        return None

    def clear(self) -> None:
        self._graphs.clear()
        self._sizes.clear()
