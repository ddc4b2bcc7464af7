"""Log-probabilities of sampled tokens, for the rows that ask.

They are the model's own: log_softmax of the logits as they come, before temperature, penalties and masks, so that a
token's figure does not depend on how it was chosen. This module knows logits and rows, not requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.contracts.step import TokenLogprobs
from cb_backend.engine.runner.device_state import copy_to
from cb_backend.layers.ops import Ops


@dataclass(frozen=True, slots=True, eq=False)
class AskingRows:
    """The rows of one step that ask. Kept from step to step while they stay the same."""

    rows: NDArray[np.intp]  # [n] of the plan
    places: NDArray[np.intp]  # [n] among the step's logits
    num_top: int  # the most that any of them asks for
    index: Tensor  # int64 [n] `places` on the device


class LogprobsOfStep:
    """Finds the rows that ask, and starts the computation for them."""

    def __init__(self, device: torch.device, ops: Ops) -> None:
        self._device = device
        self._ops = ops
        self._last: AskingRows | None = None

    def find(
        self, num_logprobs: NDArray[np.int32], rows: NDArray[np.intp], places: NDArray[np.intp]
    ) -> AskingRows | None:
        """None if no row asks. Arrays [num_sampling_rows].

        num_logprobs: -1 = does not ask; rows: the plan's rows that sample; places: where their logits stand.
        """
        asking = np.flatnonzero(num_logprobs >= 0)
        if not len(asking):
            return None
        rows, places, num_top = rows[asking], places[asking], int(num_logprobs[asking].max())
        last = self._last
        if (
            last is None
            or last.num_top != num_top
            or not np.array_equal(last.rows, rows)
            or not np.array_equal(last.places, places)
        ):
            self._last = AskingRows(rows, places, num_top, copy_to(np.asarray(places, np.int64), self._device))
        return self._last

    def launch(self, asking: AskingRows, logits: Tensor, sampled: Tensor) -> PendingLogprobs:
        """Start the computation for the tokens that were chosen.

        logits [num_rows, vocab_size] as the model gave them; sampled: int32 [num_rows].
        """
        floats, ints = self._ops.top_logprobs(logits, asking.index, sampled[asking.index], asking.num_top)
        return PendingLogprobs(asking.rows, floats, ints)


class PendingLogprobs:
    """Results on their way to the host; read them after the step's own result is there."""

    def __init__(self, rows: NDArray[np.intp], floats: Tensor, ints: Tensor) -> None:
        self._owners = rows.astype(np.int64, copy=False)
        self._floats = to_host(floats)
        self._ints = to_host(ints)

    def result(self) -> TokenLogprobs:
        floats, ints = self._floats.numpy(), self._ints.numpy()
        return TokenLogprobs(self._owners, floats[:, 0], {"rank": ints[:, 0]}, ints[:, 1:], floats[:, 1:])


def to_host(values: Tensor) -> Tensor:
    """A copy on its way to the host: read it once the device is known to be past it."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
