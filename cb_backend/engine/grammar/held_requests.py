"""Requests whose grammar is being compiled: they have arrived, but cannot start yet.

They wait in the scheduler's queue like any other, where they can be cancelled and can time out, but hold no slot and
no blocks. This module knows which grammar each waits for; the work is `grammar_compiler`'s.
"""

from __future__ import annotations

from concurrent.futures import Future

from cb_backend.engine.grammar.grammar_compiler import Grammar, GrammarCompiler
from cb_backend.errors import CbError, InvalidRequestError
from cb_backend.request import Request

COMPILE_TIMEOUT_S = 30.0  # of waiting, on a machine that is busy; the work itself ends by its own limits
TOO_SLOW = (
    f"structured output: the grammar was not compiled within {COMPILE_TIMEOUT_S:.0f} s; simplify it, or try later"
)


class HeldRequests:
    """Not thread-safe: the engine's loop calls it."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._waiting: dict[int, tuple[Request, Future[Grammar], float]] = {}  # by request id; the last: since when

    def __len__(self) -> int:
        return len(self._waiting)

    def must_wait(self, request: Request, now: float) -> bool:
        """Give the request its guide if it wants one. True: its grammar is not compiled yet, ask `settled`.

        Raises a `CbError` for a grammar that is known not to compile.
        """
        structured = request.params.structured_output
        if structured is None:
            return False
        grammar = self._compiler.compile(structured)
        if grammar.done():
            request.guide = grammar.result().new_guide(request.params)
            return False
        self._waiting[request.request_id] = (request, grammar, now)
        return True

    def forget(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)

    def settled(self, now: float) -> list[tuple[int, CbError | None]]:
        """Requests that need not wait any longer: None if they can start, else what to tell their clients."""
        done: list[tuple[int, CbError | None]] = []
        for request_id, (request, grammar, since) in list(self._waiting.items()):
            error: CbError | None = None
            if grammar.done():
                try:
                    request.guide = grammar.result().new_guide(request.params)
                except CbError as refusal:
                    error = refusal
            elif now - since > COMPILE_TIMEOUT_S:
                error = InvalidRequestError(TOO_SLOW)
            else:
                continue
            del self._waiting[request_id]
            done.append((request_id, error))
        return done
