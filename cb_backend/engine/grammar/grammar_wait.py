"""What a request of structured output waits for: its grammar, which is compiled beside the engine's loop."""

from __future__ import annotations

from concurrent.futures import Future

from cb_backend.contracts.errors import CbError, InvalidRequestError
from cb_backend.contracts.request import Request
from cb_backend.engine.grammar.grammar_compiler import Grammar, GrammarCompiler

COMPILE_TIMEOUT_S = 30.0  # of waiting, on a machine that is busy; the work itself ends by its own limits
TOO_SLOW = (
    f"structured output: the grammar was not compiled within {COMPILE_TIMEOUT_S:.0f} s; simplify it, or try later"
)


class GrammarWait:
    """A condition of a held request: met once its grammar is compiled, and the request has its guide."""

    def __init__(self, request: Request, grammar: Future[Grammar], since: float) -> None:
        self._request = request
        self._grammar = grammar
        self._since = since

    def __call__(self, now: float) -> CbError | bool:
        if self._grammar.done():
            try:
                self._request.guide = self._grammar.result().new_guide(self._request.params)
            except CbError as refusal:
                return refusal
            return True
        return InvalidRequestError(TOO_SLOW) if now - self._since > COMPILE_TIMEOUT_S else False


def grammar_wait(compiler: GrammarCompiler, request: Request, now: float) -> GrammarWait | None:
    """Give the request its guide if it wants one, or say what it must wait for.

    Raises a `CbError` for a grammar that is known not to compile.
    """
    structured = request.params.structured_output
    if structured is None:
        return None
    wait = GrammarWait(request, compiler.compile(structured), now)
    met = wait(now)
    if isinstance(met, CbError):
        raise met
    return None if met else wait
