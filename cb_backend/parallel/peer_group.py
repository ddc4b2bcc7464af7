"""A group whose devices read one another's memory: sums are fused into additions and norms, without a library.

Everything else, and sums of more rows than there is room for, goes the way of `TorchGroup`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cb_backend.kernels.reduce_norm import MAX_RANKS, PATIENCE_NS, PLACES, Peers, reduce_add_norm
from cb_backend.parallel.group import Addition, Agreed
from cb_backend.parallel.torch_group import TorchGroup

_WORD_BYTES = 8 * MAX_RANKS
_ALIGNED = 128  # bytes, of what lies in the memory behind the words
_TRIED_BYTES = 1 << 20
_LATE = f"a rank did not come to a sum within {PATIENCE_NS // 10**9} s"
_LAST_WORD = 1 << 62  # beyond every sum


class PeerMemory(NamedTuple):
    """A piece of memory of every rank, as large on each, that all of them can read and write."""

    own: Tensor  # uint8 [num_bytes]
    ranks: tuple[Tensor, ...]  # the same of every rank, this one's included

    @property
    def addresses(self) -> list[int]:
        return [memory.data_ptr() for memory in self.ranks]


def bytes_needed(max_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Of every rank's memory, for sums of up to so many rows."""
    return _ALIGNED + 2 * _buffer_bytes(max_rows, hidden_size, dtype)


def _buffer_bytes(max_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    return -(-max_rows * hidden_size * dtype.itemsize // _ALIGNED) * _ALIGNED


class PeerGroup(TorchGroup):
    """Implements `Group` over memory that the ranks share."""

    def __init__(
        self, group: TorchGroup, memory: PeerMemory, max_rows: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        """memory: `bytes_needed` of each rank, of zeros. Every rank must have made its group before any adds up."""
        super().__init__(group.processes, group.device, group.hosts)
        self.max_rows, self.dtype = max_rows, dtype
        self._memory = memory  # what `_peers` has the addresses of
        size = _buffer_bytes(max_rows, hidden_size, dtype)
        starts = (_ALIGNED, _ALIGNED + size)
        self._buffers = [
            memory.own[start : start + max_rows * hidden_size * dtype.itemsize].view(dtype).view(max_rows, hidden_size)
            for start in starts
        ]
        is_cuda = self.device.type == "cuda"
        self.failed = torch.zeros(1, dtype=torch.int32, pin_memory=is_cuda)  # 1 once a rank did not come to a sum
        self._last_words = torch.full((MAX_RANKS,), _LAST_WORD, pin_memory=is_cuda)
        self._place = 0
        self._peers = Peers(
            parts=torch.stack([self._table([base + start for base in memory.addresses]) for start in starts]),
            words=self._table(memory.addresses),
            own_words=memory.own[:_WORD_BYTES].view(torch.int64),
            step=torch.zeros(1, dtype=torch.int64, device=self.device),
            failed=self.failed,
            rank=self.rank,
            num_ranks=self.size,
        )

    def _table(self, addresses: list[int]) -> Tensor:
        filled = addresses + [0] * (MAX_RANKS - len(addresses))
        return torch.tensor(filled, dtype=torch.int64, device=self.device)

    def abandon(self) -> None:
        try:
            self._release()
        finally:  # the device may be beyond copies
            super().abandon()

    def _release(self) -> None:
        """As if all ranks had come to all sums. By a copy, for which the device has room however many programs wait."""
        self.failed.fill_(1)
        if self.device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                self._peers.own_words.copy_(self._last_words, non_blocking=True)
        else:
            self._peers.own_words.copy_(self._last_words)

    def fault(self) -> str | None:
        return _LATE if self.failed[0] else None

    def share_tokens(self, last_token: Tensor, num_tokens: Tensor, slots: Tensor) -> None:
        """Also begins a step: its sums are counted from here."""
        self._peers.step.add_(1)  # on the device, so that a replay counts too
        self._place = 0
        super().share_tokens(last_token, num_tokens, slots)

    def partial_out(self, num_rows: int) -> Tensor | None:
        return self._buffer(num_rows) if num_rows <= self.max_rows else None

    def _buffer(self, num_rows: int) -> Tensor:
        """Of the next sum. Who has come to the one before knows that all have read what was there last."""
        return self._buffers[self._place % 2][:num_rows]

    def reduce_add_norm(self, x: Tensor, residual: Tensor, junction: Addition) -> tuple[Tensor, Tensor]:
        num_rows = len(residual)
        if num_rows > self.max_rows or residual.dtype != self.dtype:
            return super().reduce_add_norm(x, residual, junction)
        place = self._place
        assert place < PLACES, "a step has more sums than can be counted"
        buffer = self._buffer(num_rows)
        self._place += 1
        if x.data_ptr() != buffer.data_ptr():  # not a product that was written there
            buffer.copy_(x if x.dim() == 2 else x.float().sum(1))
        return reduce_add_norm(self._peers, place, residual, junction.weight, junction.eps, **junction.options)


def peer_fault(group: TorchGroup, memory: PeerMemory) -> str | None:
    """Why the ranks cannot rely on this memory, the same on all of them; None: each reads what the others wrote.

    Some drivers let devices map one another's memory, and then read rubbish. The memory is zeros afterwards.
    """
    tried = min(_TRIED_BYTES, memory.own.numel())
    memory.own[:tried].copy_(_pattern(group.rank, tried, group.device))
    _wait_for_all(group)
    wrong = [
        rank
        for rank, theirs in enumerate(memory.ranks)
        if not torch.equal(theirs[:tried], _pattern(rank, tried, group.device))
    ]
    first_wrong = group.agree(-1 if not wrong else -2 - wrong[0], Agreed.LEAST)
    memory.own[:tried].zero_()
    _wait_for_all(group)
    return None if first_wrong == -1 else f"what rank {-2 - first_wrong} wrote is not what another rank reads"


def _pattern(rank: int, num_bytes: int, device: torch.device) -> Tensor:
    """Other bytes on each rank, that no shift of them is."""
    numbers = torch.arange(num_bytes, device=device, dtype=torch.int64)
    return ((numbers * (2 * rank + 3) + (numbers >> 8) + 17 * rank) % 251).to(torch.uint8)


def _wait_for_all(group: TorchGroup) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    group.agree(0, Agreed.LEAST)
