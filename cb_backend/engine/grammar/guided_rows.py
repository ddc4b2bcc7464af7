"""The guides of running requests: asked for the masks of a step that is being launched, fed the tokens it gave.

A guide must know a row's last token before its next mask can be made. Where steps are launched ahead, that token is
still on its way when the next step's layers are launched; so whoever asks for masks asks as late as possible, and
waits here for the steps before. What is asked for is fed: a guide follows just the tokens that were sampled under its
masks. Guides belong to their requests; here they are only borrowed. Devices are not known here.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.step import NO_TOKEN, Failure, JoinedRow, RowStatus, StepPlan, StepResult, TokenMasks
from cb_backend.engine.grammar.guide import OUT_OF_STEP, Guide
from cb_backend.engine.grammar.mask_threads import MaskThreads


class LaunchedStep(Protocol):
    """A step on its way. `result()` waits for it the first time, and is the same every time."""

    plan: StepPlan

    def result(self) -> StepResult: ...


class FedStep:
    """The rows of one launched step that have guides: what they sample is fed to these, once."""

    def __init__(self, step: LaunchedStep, rows: list[int], guides: list[Guide], lost_rows: list[int]) -> None:
        """`rows` of the plan, and the guide of each; `lost_rows`: those whose guides are elsewhere."""
        self.guides = guides
        self._step = step
        self._rows = rows
        # Row -> what to tell the client: of masks that could not be had, and, once fed, of tokens that must not be.
        self._failures = dict.fromkeys(lost_rows, OUT_OF_STEP)
        self._failures |= {row: guide.failure for row, guide in zip(rows, guides, strict=True) if guide.failure}

    def feed(self) -> None:
        """Waits for the step."""
        result = self._step.result()
        for row, guide in zip(self._rows, self.guides, strict=True):
            for token_id in result.token_ids[row, : result.num_new[row]].tolist():
                guide.consume(token_id)
            if result.num_new[row] and guide.failure is not None:
                self._failures[row] = guide.failure

    def checked(self, result: StepResult) -> StepResult:
        """The step's result, in which rows have failed whose guides cannot go on."""
        if not self._failures:
            return result
        failed = list(self._failures)
        token_ids, num_new, status = result.token_ids.copy(), result.num_new.copy(), result.status.copy()
        token_ids[failed], num_new[failed], status[failed] = NO_TOKEN, 0, RowStatus.RULED_OUT
        # Before what others say of these rows: the first reason is the one that is told.
        reasons = tuple(Failure(np.array([row]), text) for row, text in self._failures.items())
        return StepResult(result.step_id, token_ids, num_new, status, reasons + result.attached)


class GuidedRows:
    """Implements `step.MaskSource`. One caller at a time."""

    def __init__(self) -> None:
        self.is_asked = False  # masks were asked for, and the step they are for has not been launched yet
        self._asked: dict[int, Guide] = {}  # by slot: for that step
        self._lost: list[int] = []  # slots whose guides are not where that step's rows are
        self._guides: dict[int, tuple[weakref.ref[Guide], int]] = {}  # by slot, with the prompt's length
        self._unread: list[FedStep] = []  # launched, their tokens not fed yet; oldest first
        self._threads = MaskThreads()

    def join(self, row: JoinedRow, guide: Guide) -> None:
        """A request with a guide takes a slot, in the step that is launched next."""
        # Nothing that was sampled before the guide moves may be fed to it afterwards.
        concerned = [index for index, step in enumerate(self._unread) if guide in step.guides]
        if concerned:
            self._feed(concerned[-1] + 1)
        guide.follow(row.token_ids[row.num_prompt_tokens :].tolist())
        self._guides[row.slot] = weakref.ref(guide), row.num_prompt_tokens

    def masks(self, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> TokenMasks | None:
        """As `MaskSource` says. None of slots whose request is gone."""
        self._feed(len(self._unread))
        rows: list[int] = []
        guides: list[Guide] = []
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            reference, num_prompt_tokens = self._guides.get(slot, (None, 0))
            guide = None if reference is None else reference()
            if guide is None:
                continue
            self.is_asked = True
            # NOTE: after a stop token, or a row that failed, steps that were launched before that was known ask in
            # vain. Nobody looks at those rows; the guide may be wanted again, if its request is preempted meanwhile.
            if guide.is_after(position - num_prompt_tokens):
                self._asked[slot] = guide
                rows.append(row)
                guides.append(guide)
            else:
                self._lost.append(slot)
        if not guides:
            return None
        bits = np.zeros((len(guides), guides[0].num_mask_words), np.int32)
        self._threads.fill(guides, bits)
        forced = [guide.eos_token_id if guide.is_complete else NO_TOKEN for guide in guides]
        return TokenMasks(np.array(rows, np.intp), bits, np.array(forced, np.int32))

    def launched(self, step: LaunchedStep) -> FedStep:
        """The step that masks were asked for is on its way."""
        slots = step.plan.slots
        rows = np.isin(slots, list(self._asked)).nonzero()[0]
        lost_rows = np.isin(slots, self._lost).nonzero()[0]
        guides = [self._asked[slot] for slot in slots[rows].tolist()]
        fed = FedStep(step, rows.tolist(), guides, lost_rows.tolist())
        self._unread.append(fed)
        self.not_launched()
        return fed

    def not_launched(self) -> None:
        """The step that masks were asked for could not be launched."""
        self.is_asked, self._asked, self._lost = False, {}, []

    def read(self, step: FedStep, result: StepResult) -> StepResult:
        """A step's result is there: feed its guides if it has not been done; rows that must not go on have failed."""
        if step in self._unread:
            self._feed(self._unread.index(step) + 1)
        return step.checked(result)

    def lost(self, step: FedStep) -> None:
        """A step did not come back."""
        if step in self._unread:
            self._unread.remove(step)

    def close(self) -> None:
        self._threads.close()
        self._unread.clear()

    def _feed(self, num_steps: int) -> None:
        """The oldest so many."""
        for _ in range(num_steps):
            self._unread.pop(0).feed()
