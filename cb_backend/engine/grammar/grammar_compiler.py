"""Grammars of clients compiled off the engine's loop: a few threads, limits on size and work, a cache.

llguidance does the work (Rust; it holds no interpreter lock meanwhile, and bounds the work of a grammar by the limits
below). A text that is wrong or too complex gives an `InvalidRequestError` for its own request, and is remembered like
one that compiles. The library and the tokenizer's table are loaded by the first request that asks for a grammar.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cb_backend.contracts.errors import CbError, ConfigError, ErrorCode, InvalidRequestError
from cb_backend.contracts.structured_output import StructuredOutput
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.grammar.guide import TOO_COMPLEX, Guide
from cb_backend.engine.grammar.token_table import TokenTable

if TYPE_CHECKING:  # imported at first use, so that nobody else pays for it
    from llguidance import LLMatcher, LLTokenizer

NUM_THREADS = 2
MAX_CPU_S = 1.0  # of a thread on one grammar: what takes longer will be slow at every token
MAX_CACHED = 256  # grammars, the least recently used go first
# One space, or a line break and its indentation: a model that likes white space best cannot fill its answer with it.
_WHITE_SPACE = r"(\x20|\x0A[\x20\x09]{0,32})?"
# What a grammar may cost, in the library's units: the first bounds compiling to about half a second, the others each
# token. They do not bound time well where expressions are huge, which is why `mask_threads` looks at the clock.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
_NUM_PROBED = 8  # tokens
_MAX_SHOWN = 300  # characters of the library's reason
_WORDS = {"json": "JSON schema", "regex": "regex", "choice": "list of choices", "grammar": "grammar"}

logger = logging.getLogger("cb_backend.engine")


class Grammar:
    """A compiled grammar, from which any number of requests start."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._was_too_slow = False

    def new_guide(self, params: TokenRules | None = None) -> Guide:
        """A guide at the start. Raises `InvalidRequestError` if an earlier one became too slow.

        With `ignore_eos` (and no stop_token_ids that say otherwise) it ends only where nothing else is allowed.
        """
        if self._was_too_slow:
            raise InvalidRequestError(TOO_COMPLEX)
        is_eos_last = params is not None and params.ignore_eos and not {*params.stop_token_ids} & {*self._eos_token_ids}
        matcher = self._matcher.deep_copy()
        return Guide(matcher, self._vocab_size, self._eos_token_ids, is_eos_last, self._note_too_slow)

    def _note_too_slow(self) -> None:
        self._was_too_slow = True


class GrammarCompiler:
    """Compiles each `StructuredOutput` once. `compile` is called by one thread; the work is done by others."""

    def __init__(self, tokenizer_dir: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size`: of the model's logits, padding included."""
        self.num_compiled = 0  # this and the following count since the start
        self.num_refused = 0
        self.seconds = 0.0  # spent compiling
        self._folder = Path(tokenizer_dir)
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._cache: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()  # guards the tokenizer and the counts
        self._tokenizer: LLTokenizer | None = None

    def compile(self, structured: StructuredOutput) -> Future[Grammar]:
        """The grammar, now or later. The future's exception is a `CbError` for the client."""
        future = self._cache.get(structured)
        if future is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
            future = self._cache[structured] = self._pool.submit(self._compile, structured)
        self._cache.move_to_end(structured)
        for old in list(self._cache)[: max(0, len(self._cache) - MAX_CACHED)]:
            if self._cache[old].done():
                del self._cache[old]
        return future

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._cache.clear()

    # ---- on the threads --------------------------------------------------------------------------------------------

    def _compile(self, structured: StructuredOutput) -> Grammar:
        begin = time.perf_counter()
        is_compiled = False
        try:
            tokenizer = self._load_tokenizer()
            begin = time.perf_counter()
            grammar = Grammar(_matcher(structured, tokenizer), tokenizer.vocab_size, self._eos_token_ids)
            is_compiled = True
            return grammar
        except CbError:
            raise
        except MemoryError:
            raise InvalidRequestError(
                f"structured output: the {_WORDS[structured.kind]} needs too much memory"
            ) from None
        except BaseException as error:  # a panic of the library is no Exception
            logger.exception("a grammar of kind %s could not be compiled", structured.kind)
            raise InvalidRequestError(
                f"structured output: the {_WORDS[structured.kind]} could not be compiled; simplify it"
            ) from error
        finally:
            with self._lock:
                self.num_compiled += is_compiled
                self.num_refused += not is_compiled
                self.seconds += time.perf_counter() - begin

    def _load_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                begin = time.perf_counter()
                self._tokenizer = _new_tokenizer(self._folder, self._vocab_size, self._eos_token_ids)
                logger.info("structured output: the token table is ready after %.1f s", time.perf_counter() - begin)
            return self._tokenizer


def _new_tokenizer(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    if not eos_token_ids:
        raise InvalidRequestError(
            "structured output needs an end-of-sequence token, and this model has none; set eos_token_id in its config"
        )
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
        raise _library_error("is not installed") from None
    try:
        table = TokenTable(folder, eos_token_ids)
    except ConfigError as error:
        raise InvalidRequestError(f"structured output needs the model's tokenizer: {error}") from None
    num_ids = max(vocab_size, len(table.tokens))
    try:
        return LLTokenizer(TokenizerWrapper(table), n_vocab=num_ids, eos_token=list(eos_token_ids))
    except TypeError:
        raise _library_error("is older than 1.7") from None


def _library_error(what: str) -> CbError:
    error = CbError(f"structured output needs llguidance, which {what} for the engine's Python; install a newer one")
    error.code = ErrorCode.UNSUPPORTED
    return error


def _matcher(structured: StructuredOutput, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the start, its first mask made: that is where the library builds most of its tables."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        text = _library_text(structured)
    except ValueError as error:
        raise _refusal(structured, str(error)) from None
    begin = time.thread_time()
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**_LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise _refusal(structured, matcher.get_error())
    if not _can_begin(matcher, tokenizer) or time.thread_time() - begin > MAX_CPU_S:
        raise _refusal(structured, "it is too complex")
    return matcher


def _can_begin(matcher: LLMatcher, tokenizer: LLTokenizer) -> bool:
    """Whether a few tokens can be followed: a grammar that explodes mostly does so here."""
    probe = matcher.deep_copy()
    for step in range(_NUM_PROBED):
        mask = np.frombuffer(probe.compute_bitmask(), np.uint8)
        token_ids = np.setdiff1d(np.flatnonzero(np.unpackbits(mask, bitorder="little")), tokenizer.eos_tokens)
        if probe.is_error() or not len(token_ids):
            break
        probe.consume_token(int(token_ids[-1 if step % 2 else 0]))
    return not probe.is_error()


def _library_text(structured: StructuredOutput) -> str:
    """The grammar in the library's own form. Raises `ValueError` for what can be seen to be wrong."""
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    if structured.kind == "json":
        # The last word, so that a schema's own options do not lift the bound.
        options: Any = {"item_separator": ",", "key_separator": ":", "lenient": False, "coerce_one_of": True}
        options |= {"whitespace_flexible": False} if structured.is_compact else {"whitespace_pattern": _WHITE_SPACE}
        return LLMatcher.grammar_from_json_schema(structured.text, overrides=options)
    if structured.kind == "regex":
        if (len(structured.text) - len(structured.text.rstrip("\\"))) % 2:
            raise ValueError("it ends with a backslash that escapes nothing")
        # As in JSON schemas: \d and \w are ASCII.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(structured.text, 'dw')}/")
    if structured.kind == "grammar":
        return grammar_from("gbnf" if "::=" in structured.text else "lark", structured.text)
    return grammar_from(structured.kind, structured.text)


def _refusal(structured: StructuredOutput, reason: str) -> InvalidRequestError:
    """What the library says, in one printable line, without its marks."""
    reason = reason.partition("<non-verbose/>")[0].partition("<state>")[0]
    reason = " ".join(reason.split()).encode("ascii", "backslashreplace").decode()
    if reason.startswith("NoExtension") or not reason:
        reason = "it allows no output at all"
    if len(reason) > _MAX_SHOWN:
        reason = f"{reason[:_MAX_SHOWN]}..."
    return InvalidRequestError(f"structured output: the {_WORDS[structured.kind]} cannot be used: {reason}; change it")
