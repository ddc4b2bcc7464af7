"""Log-probabilities of sampled tokens, for the rows that ask.

They are the model's own: log_softmax of the logits as they come, before temperature, penalties and masks, so that a
token's figure does not depend on how it was chosen. One rule of rank everywhere: 1 + the number of strictly likelier
tokens. This module knows logits and rows, not requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.outputs import TokenLogprobs

_ROWS_AT_ONCE = 16  # a row's intermediate results take 20 bytes a token id


@dataclass(frozen=True, slots=True)
class AskingRows:
    """The rows of one step that ask, with their logits as the model gave them."""

    rows: NDArray[np.intp]  # [n] of the plan
    index: Tensor  # int64 [n] their places among the rows that sample
    logits: Tensor  # [n, vocab_size] a copy: sampling changes its own
    num_top: int  # the most that any of them asks for

    @staticmethod
    def find(logits: Tensor, num_logprobs: NDArray[np.int32], rows: NDArray[np.intp]) -> AskingRows | None:
        """Call before anything changes the logits. None if no row asks.

        logits [num_sampling_rows, vocab_size]; num_logprobs [num_sampling_rows], -1 = does not ask; rows
        [num_sampling_rows] the plan's rows that sample.
        """
        asking = np.flatnonzero(num_logprobs >= 0)
        if not len(asking):
            return None
        index = torch.from_numpy(asking).to(logits.device)
        return AskingRows(rows[asking], index, logits[index], int(num_logprobs[asking].max()))

    def launch(self, sampled: Tensor) -> PendingLogprobs:
        """Start the computation for the tokens that were chosen. sampled: int32 [num_sampling_rows]."""
        return PendingLogprobs(self.rows, *compute_logprobs(self.logits, sampled[self.index], self.num_top))


class PendingLogprobs:
    """Results on their way to the host; read them after the step's own result is there."""

    def __init__(self, rows: NDArray[np.intp], floats: Tensor, ints: Tensor) -> None:
        self._rows = rows
        self._floats = _to_host(floats)
        self._ints = _to_host(ints)

    def result(self) -> TokenLogprobs:
        floats, ints = self._floats.numpy(), self._ints.numpy()
        return TokenLogprobs(self._rows, floats[:, 0], ints[:, 0], ints[:, 1:], floats[:, 1:])


def compute_logprobs(logits: Tensor, sampled: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Two tensors: logprobs of the sampled token and of the k likeliest, and the sampled one's rank and their ids.

    logits [n, vocab_size] of any float type; sampled int32 [n]. Returns float32 and int32 [n, 1 + k]; the k likeliest
    stand in order, ties by id.
    """
    shape = (logits.shape[0], 1 + min(num_top, logits.shape[1]))
    floats = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ints = torch.empty(shape, dtype=torch.int32, device=logits.device)
    for start in range(0, logits.shape[0], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        logprobs = logits[part].float().log_softmax(dim=-1)
        chosen = logprobs.gather(1, sampled[part].long().unsqueeze(1))  # [rows, 1]
        ids = _order_key(logprobs).topk(shape[1] - 1, dim=-1).indices  # [rows, k]
        floats[part] = torch.cat((chosen, logprobs.gather(1, ids)), dim=1)
        ints[part] = torch.cat(((logprobs > chosen).sum(1, keepdim=True) + 1, ids), dim=1).to(torch.int32)
    return floats, ints


def _order_key(values: Tensor) -> Tensor:
    """int64 of the order of float32 `values`, with ties broken for the lower column: topk itself promises none."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: the two zeros are one value
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (ordered << 32) - torch.arange(values.shape[1], device=values.device)


def _to_host(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
