"""Structured output in a step: the masks of its rows' guides put on their logits, the sampled tokens fed back.

A guide must know a row's last token before its next mask can be made. Where steps are launched ahead, that token is
still on its way when the next step's layers are launched, so masks are made as late as possible, while the device
computes: `GuidedRows.mask_logits` waits for the steps before. Rows without a guide are not touched.

For a row's logits x, before every other rule: what the grammar does not allow becomes -inf. After every other rule: if
the grammar allows nothing more, the end-of-sequence token gets 0, so that it comes whatever min_tokens,
allowed_token_ids or bad_words say.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.engine.grammar.guide import Guide
from cb_backend.engine.grammar.mask_threads import MaskThreads
from cb_backend.layers.ops import Ops
from cb_backend.outputs import JoinedRow

SampledTokens = tuple[NDArray[np.int32], NDArray[np.bool_]]  # token ids, is_failed: [num_plan_rows] each


class TokenMasks:
    """The guides of all slots that have one. They belong to their requests; here they are only borrowed."""

    def __init__(self, num_slots: int, device: torch.device, ops: Ops) -> None:
        self.has_guide = np.zeros(num_slots, np.bool_)
        self._guides: dict[int, weakref.ref[Guide]] = {}
        self._device = device
        self._ops = ops
        self._threads = MaskThreads()
        self._unread: list[GuidedRows] = []  # of launched steps, oldest first

    def join(self, rows: Sequence[JoinedRow]) -> None:
        """Take over the guides of requests that join a slot, and forget those of the requests before."""
        for row in rows:
            self._guides.pop(row.slot, None)
            self.has_guide[row.slot] = row.guide is not None
            if row.guide is not None:
                guide = cast(Guide, row.guide)
                self._finish_rows_of(guide)
                guide.follow(row.token_ids[row.num_prompt_tokens :].tolist())
                self._guides[row.slot] = weakref.ref(guide)

    def find(self, slots: NDArray[np.int32], rows: NDArray[np.intp]) -> GuidedRows | None:
        """The rows with guides among some that sample; None if there are none.

        slots [n]: theirs; rows [n]: their numbers in the plan. The step must be finished by `GuidedRows.launched`.
        """
        indices = np.flatnonzero(self.has_guide[slots])
        found = [(int(i), guide) for i in indices if (guide := self._guides[int(slots[i])]()) is not None]
        if not found:
            return None
        at = np.array([i for i, _ in found])
        return GuidedRows(self, [guide for _, guide in found], at, rows[at].tolist())

    def close(self) -> None:
        self._threads.close()
        self._unread.clear()

    # ---- for GuidedRows --------------------------------------------------------------------------------------------

    def put_on(self, logits: Tensor, guides: Sequence[Guide], indices: NDArray[np.intp]) -> None:
        """Make the guides' masks and put them on the rows `indices` of the logits."""
        self._read_all(self._unread)
        host = torch.zeros(len(guides), guides[0].num_mask_words, dtype=torch.int32, pin_memory=self._is_cuda)
        self._threads.fill(guides, host.numpy())
        self._ops.apply_token_bitmask(logits, host.to(self._device, non_blocking=True), self.to_device(indices))

    def to_device(self, values: NDArray[np.intp]) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._is_cuda else tensor

    def was_launched(self, rows: GuidedRows) -> None:
        self._unread.append(rows)

    def was_read(self, rows: GuidedRows) -> None:
        self._unread.remove(rows)

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def _finish_rows_of(self, guide: Guide) -> None:
        """Nothing that was sampled before the guide moves may be fed to it afterwards."""
        concerned = [i for i, rows in enumerate(self._unread) if guide in rows.guides]
        if concerned:
            self._read_all(self._unread[: concerned[-1] + 1])

    def _read_all(self, unread: list[GuidedRows]) -> None:
        for rows in list(unread):
            rows.read_tokens()


class GuidedRows:
    """The rows of one step that have guides."""

    def __init__(
        self,
        masks: TokenMasks,
        guides: list[Guide],
        indices: NDArray[np.intp],
        rows: list[int],
    ) -> None:
        """Parallel: `indices` among the rows that were asked about, `rows` in the plan."""
        self.guides = guides
        self.failures: dict[int, str] = {}  # row in the plan -> what to tell the client; complete once tokens are read
        self._masks = masks
        self._indices = indices
        self._rows = rows
        self._sampled: Callable[[], SampledTokens] | None = None
        self._is_read = False

    def mask_logits(self, logits: Tensor) -> None:
        """Before all other rules. Waits for the steps before, not for this one.

        logits: [number of rows that were asked about, vocab_size], changed in place.
        """
        self._masks.put_on(logits, self.guides, self._indices)
        for row, guide in zip(self._rows, self.guides, strict=True):
            if guide.failure is not None:
                self.failures[row] = guide.failure

    def force_ends(self, logits: Tensor) -> None:
        """After all other rules: where nothing but an end is allowed, allow it."""
        complete = [i for i, guide in enumerate(self.guides) if guide.is_complete]
        if complete:
            where = np.array([[self._indices[i], self.guides[i].eos_token_id] for i in complete]).T
            rows, token_ids = self._masks.to_device(np.ascontiguousarray(where))
            logits.index_put_((rows, token_ids), logits.new_zeros(len(complete)))

    def launched(self, sampled: Callable[[], SampledTokens]) -> GuidedRows:
        """The rows have sampled; `sampled` waits for what came out. Returns self."""
        self._sampled = sampled
        self._masks.was_launched(self)
        return self

    def read_tokens(self) -> dict[int, str]:
        """Feed the guides what their rows sampled, the first time. Returns the rows whose guides failed, and why."""
        if self._is_read or self._sampled is None:
            return self.failures
        self._is_read = True
        self._masks.was_read(self)
        token_ids, is_failed = self._sampled()
        for row, guide in zip(self._rows, self.guides, strict=True):
            if is_failed[row]:
                continue
            guide.consume(int(token_ids[row]))
            if guide.failure is not None:
                self.failures[row] = guide.failure
        return self.failures
