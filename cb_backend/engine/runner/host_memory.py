"""The host's memory of steps on their way: what a plan brings to a shape's buffers, and where results come back.

Pinned on a GPU, so that copies need no waiting; a ring of each, so that nothing is written again before it is read.
This module does not know what the arrays hold.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.contracts.config import MAX_RUN_AHEAD
from cb_backend.engine.runner.step_buffers import padding, split
from cb_backend.engine.step_shapes import StepShape

RING = 2 * MAX_RUN_AHEAD  # more than the deepest run-ahead

HostSteps = list[tuple[Tensor, dict[str, NDArray[np.int32]]]]  # of one shape: the ring, and its views by segment


class HostMemory:
    """Rings of host memory, by the step's id."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._padding_slot = num_slots
        self._is_cuda = device.type == "cuda"
        # Twice the rows: a step's result has columns for the bucket's decode rows and for its prompts.
        self._results = [
            torch.zeros(2 * 2 * num_slots + 64, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(RING)
        ]
        self._result_views: dict[tuple[int, int], tuple[Tensor, NDArray[np.int32]]] = {}  # by index and rows
        self._steps: dict[StepShape, HostSteps] = {}
        self._events = [torch.cuda.Event() for _ in range(RING)] if self._is_cuda else None

    def prepare(self, shapes: Iterable[StepShape]) -> None:
        """Make what the host brings to steps of these shapes: pinning memory while serving stops the device."""
        for shape in shapes:
            self._steps[shape] = self._new_steps(shape)

    def step(self, shape: StepShape, step_id: int) -> tuple[Tensor, dict[str, NDArray[np.int32]]]:
        """Memory for what the host brings to a step of this shape, as torch and by segment as NumPy sees it."""
        ring = self._steps.get(shape)
        if ring is None:
            ring = self._steps[shape] = self._new_steps(shape)
        return ring[step_id % RING]

    def fetch(self, step_id: int, result: Tensor) -> tuple[NDArray[np.int32], torch.cuda.Event | None]:
        """Start to copy a step's result [2, num_rows], the last thing that is launched for it.

        Returns where it will be, and what says when it is there; None: it is.
        """
        memory, values = self.result(step_id, result.shape[1])
        memory.copy_(result, non_blocking=True)  # one contiguous copy: a strided one would make torch wait
        if self._events is None:
            return values, None
        done = self._events[step_id % RING]
        done.record()
        return values, done

    def result(self, step_id: int, num_rows: int) -> tuple[Tensor, NDArray[np.int32]]:
        """Memory [2, num_rows] for a step's result, as torch and as NumPy see it."""
        index = step_id % RING
        found = self._result_views.get((index, num_rows))
        if found is not None:
            return found
        memory = self._results[index]
        is_ring = 2 * num_rows <= memory.numel()
        if not is_ring:  # an eager step of very many prompts
            memory = torch.zeros(2 * num_rows, dtype=torch.int32, pin_memory=self._is_cuda)
        view = memory[: 2 * num_rows].view(2, num_rows)
        if is_ring:
            self._result_views[index, num_rows] = view, view.numpy()
        return view, view.numpy()

    def _new_steps(self, shape: StepShape) -> HostSteps:
        hosts = torch.from_numpy(np.tile(padding(shape, self._padding_slot), (RING, 1)))
        hosts = hosts.pin_memory() if self._is_cuda else hosts
        return [(host, split(host.numpy(), shape)) for host in hosts.unbind()]
