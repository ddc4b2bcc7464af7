"""What keeps one request's output inside its grammar: which tokens may come next, given those that have come.

A guide belongs to its request and lives as long as it does, through preemptions too. It follows token values, so it
is always one step behind a device that runs ahead; whoever samples has to bring it up to date first. It does not know
slots, steps or tensors. The matching itself is llguidance's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # imported only where a grammar is compiled
    from llguidance import LLMatcher

TOO_COMPLEX = "structured output: the grammar is too complex to be followed token by token; simplify it"
NOT_ALLOWED = "structured output: a token came that the grammar does not allow; send the request again"

OUT_OF_STEP = "structured output: the grammar and the output are out of step; send the request again"


class Guide:
    """One request's place in its grammar. Errors are kept, not raised: see `failure`."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        is_eos_last: bool = False,
        on_too_slow: Callable[[], None] = lambda: None,
    ) -> None:
        """`matcher` at the grammar's start, nobody else's. `vocab_size`: token ids that masks speak of.

        `is_eos_last`: no end before nothing else is allowed. `on_too_slow` is called when a mask has taken too long.
        """
        self.num_mask_words = -(-vocab_size // 32)  # int32 words of a mask
        self.eos_token_id = eos_token_ids[0]  # the one to end with where the output must end
        self.failure: str | None = None  # why this guide cannot go on, for the client
        self._eos_token_ids = eos_token_ids
        self._matcher = matcher
        self._token_ids: list[int] = []  # consumed
        self._is_eos_last = is_eos_last
        self._on_too_slow = on_too_slow

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing more, so that the output must end."""
        return self.failure is None and bool(self._matcher.is_stopped())

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Be where these output tokens lead, wherever it was before: after a preemption the last may be gone."""
        if self.failure is not None:
            return
        num_common = 0
        for ours, theirs in zip(self._token_ids, output_token_ids, strict=False):
            if ours != theirs:
                break
            num_common += 1
        undone = [token_id for token_id in self._token_ids[num_common:] if token_id not in self._eos_token_ids]
        if undone:
            self._matcher.rollback(len(undone))
        del self._token_ids[num_common:]
        for token_id in output_token_ids[num_common:]:
            self.consume(int(token_id))

    def is_after(self, num_output_tokens: int) -> bool:
        """Whether the next mask is for the token after so many."""
        return self.failure is not None or len(self._token_ids) == num_output_tokens

    def consume(self, token_id: int) -> None:
        """Take in the next output token."""
        if self.failure is not None:
            return
        self._token_ids.append(token_id)
        # NOTE: an end is not shown to the matcher, which would count it as a token in some states only.
        is_end = token_id in self._eos_token_ids
        if not (self._matcher.is_accepting() if is_end else self._matcher.consume_token(token_id)):
            self.failure = NOT_ALLOWED

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Write which tokens may come next: bit i % 32 of word i // 32 for token i. Holds no interpreter lock.

        mask: int32 [num_mask_words], contiguous.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def finish_mask(self, mask: NDArray[np.int32]) -> None:
        """What is left to do when `fill_mask` has come back in time: errors noticed, an early end taken out."""
        if self._matcher.is_error():
            self.failure = TOO_COMPLEX
        elif self._is_eos_last and not self._matcher.is_stopped():
            before = mask.copy()
            bits = mask.view(np.uint32)
            for token_id in self._eos_token_ids:
                bits[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
            if not mask.any():
                mask[:] = before

    def give_up(self) -> None:
        """`fill_mask` takes too long. Its thread still has the matcher, so nobody else may touch it again."""
        self.failure = TOO_COMPLEX
        self._on_too_slow()
