"""Grammars of a simulated world, without a compiler: the text says how many turns compiling takes, and how it ends.

"3" is ready after three turns, "bad 3" is refused then, and "0" is known at once. Nothing is masked: what a grammar
changes for scheduling is that its request is held until it is compiled, and that steps with it run less far ahead. Its
guide sees to being asked just after it has been fed the token before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.structured_output import StructuredOutput
from cb_backend.engine.grammar.grammar_wait import COMPILE_TIMEOUT_S

SLOW_TURNS = 600  # of a grammar that is given up at its time limit, if turns take time


def make_grammar(num_turns: int, is_bad: bool) -> StructuredOutput:
    return StructuredOutput(kind="grammar", text=f"{'bad ' if is_bad else ''}{num_turns}")


def may_be_refused(grammar: StructuredOutput | None, turn_s: float) -> bool:
    """Whether it is bad, or takes longer than is waited for. A turn takes `turn_s` seconds."""
    if grammar is None:
        return False
    *marks, num_turns = grammar.text.split()
    return bool(marks) or int(num_turns) * turn_s > COMPILE_TIMEOUT_S


class _Grammar:
    """Stands for the future of a compilation."""

    def __init__(self, text: str, turn: Callable[[], int]) -> None:
        *marks, num_turns = text.split()
        self._is_bad = bool(marks)
        self._turn = turn
        self._ready_at = turn() + int(num_turns)

    def done(self) -> bool:
        return self._turn() >= self._ready_at

    def result(self) -> _Grammar:
        if self._is_bad:
            raise InvalidRequestError("structured output: the grammar is bad")
        return self

    def new_guide(self, _params: object) -> _Guide:
        return _Guide()


class _Guide:
    """Allows everything; follows as `Guide` does."""

    num_mask_words = 1
    is_complete = False
    eos_token_id = 0

    def __init__(self) -> None:
        self.failure = None
        self._token_ids: list[int] = []

    def follow(self, output_token_ids: list[int]) -> None:
        self._token_ids = list(output_token_ids)

    def is_after(self, num_output_tokens: int) -> bool:
        return len(self._token_ids) == num_output_tokens

    def consume(self, token_id: int) -> None:
        self._token_ids.append(token_id)

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        mask[:] = -1

    def finish_mask(self, mask: NDArray[np.int32]) -> None:
        """Nothing is left to do."""


class MasksInPlace:
    """Stands for the threads that fill masks: being switched to costs more than these masks, and the more on a busy
    machine."""

    def fill(self, guides: Sequence[_Guide], masks: NDArray[np.int32]) -> None:
        for guide, mask in zip(guides, masks, strict=True):
            guide.fill_mask(mask)
            guide.finish_mask(mask)

    def close(self) -> None:
        """There is nothing to give back."""


class SimulatedCompiler:
    """Compiles each grammar once, like `GrammarCompiler`."""

    def __init__(self, turn: Callable[[], int]) -> None:
        self.num_compiled = self.num_refused = 0  # nobody looks at these here
        self.seconds = 0.0
        self._turn = turn
        self._known: dict[StructuredOutput, _Grammar] = {}

    def close(self) -> None:
        """There is nothing to give back."""

    def compile(self, structured: StructuredOutput) -> _Grammar:
        return self._known.setdefault(structured, _Grammar(structured.text, self._turn))
