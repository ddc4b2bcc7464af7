"""Grammars compiled beside the engine's loop: what is refused and how, what is remembered, what tokens spell."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import decoders

from cb_backend.contracts.errors import CbError, ConfigError, ErrorCode, InvalidRequestError
from cb_backend.contracts.structured_output import StructuredOutput
from cb_backend.engine.grammar.grammar_compiler import GrammarCompiler
from cb_backend.engine.grammar.guide import TOO_COMPLEX, Guide
from cb_backend.engine.grammar.mask_threads import MaskThreads
from cb_backend.engine.grammar.token_table import TokenTable
from tests.engine.structured import json_schema
from tests.front_end.conftest import (
    CONFIG,
    ByteFallbackKit,
    ByteLevelKit,
    Kit,
    byte_fallback_backend,
    byte_level_backend,
)
from tests.server.tiny_checkpoint import VOCAB_SIZE
from tests.waiting import WAIT_S


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(kind="regex", text=text)


def allowed(guide: Guide) -> set[int]:
    mask = np.zeros(guide.num_mask_words, np.int32)
    guide.fill_mask(mask)
    guide.finish_mask(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


# ---- refusals ------------------------------------------------------------------------------------------------------

BAD_REGEXES = [
    "foo**(", "(", "[a", "a{2,1}", "(?<=a)b", "(?P<n>a", "(?=a)b", r"(a)\1", r"\p{Nonsense}", "*", "+a",
    "a{99999999999}", "[z-a]", "(?P<1a>x)", "\\", "(((((", "a|*", "(?i", r"\xZZ", r"\u12", "x{1000000}{1000000}",
    "(a{1000}){1000}", "((a{100}){100}){100}", "(" * 300 + "a" + ")" * 300, "a$b",
]  # fmt: skip
BAD_SCHEMAS: list[dict[str, Any]] = [
    {"type": "strange"}, {"type": 5}, {"properties": 3}, {"$ref": "#/$defs/missing"}, {"$ref": "http://x.org/y.json"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"enum": []}, {"type": "string", "pattern": "foo**("},
    {"type": "integer", "minimum": 5, "maximum": 3}, {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "array", "uniqueItems": True}, {"not": {"type": "string"}}, {"type": "string", "format": "nonsense"},
    {"type": "array", "minItems": 5, "maxItems": 2}, {"type": "integer", "minimum": 10**30},
]  # fmt: skip
BAD_GRAMMARS = [
    "nonsense(", "root ::= (", "root ::= undefined", "start: undefined", "start: start", 'start: "a', "start: /foo**(/",
    "start: %json {", 'begin: "a"', "start: a\na: b\nb: a", 'root ::= "a" "', "start: @nothing", "start: <nope>",
]  # fmt: skip
BAD = [
    *(regex(text) for text in BAD_REGEXES),
    *(json_schema(schema) for schema in BAD_SCHEMAS),
    *(StructuredOutput(kind="grammar", text=text) for text in BAD_GRAMMARS),
]


def test_w1_bad_patterns_are_refused_with_the_reason_each_in_time(compiler: GrammarCompiler) -> None:
    """Case W1: more than 50 of them, none held for long; the compiler works on afterwards."""
    assert len(BAD) >= 50
    compiler.compile(regex("warm up")).result()
    wrongly_taken = []
    for structured in BAD:
        try:
            compiler.compile(structured).result(timeout=WAIT_S)
            wrongly_taken.append(structured.text[:40])
        except InvalidRequestError as error:
            text = str(error)
            assert text.startswith("structured output: the "), text
            assert text.isprintable(), text
            assert len(text) < 400, text
            assert "/home" not in text and "site-packages" not in text, text  # noqa: PT018 one property
    assert not wrongly_taken
    assert compiler.compile(regex("a+")).result().new_guide().failure is None


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        (regex("foo**("), "the regex cannot be used: .*unclosed group.*; change it"),
        (regex("(a{1000}){1000}"), "the regex cannot be used: .*too (complex|many expressions).*; change it"),
        (regex("a\\"), "it ends with a backslash that escapes nothing"),
        (json_schema({"type": "strange"}), "the JSON schema cannot be used: Invalid type: strange; change it"),
        (json_schema({"not": {}}), 'the JSON schema cannot be used: Unimplemented keys: .*not'),
        (StructuredOutput(kind="grammar", text="start: start"), "the grammar cannot be used: it allows no output"),
        (StructuredOutput(kind="grammar", text="root ::= ("), "the grammar cannot be used: .*GBNF"),
    ],
)  # fmt: skip
def test_the_reason_names_what_is_wrong(compiler: GrammarCompiler, structured: StructuredOutput, reason: str) -> None:
    for _ in range(2):  # the second time out of the cache
        with pytest.raises(InvalidRequestError, match=reason):
            compiler.compile(structured).result()


@pytest.mark.parametrize("text", ["(a+)+$", "(a|a)*b", "(x+x+)+y", "(.*a){20}", "(a|b)*a(a|b){20}", "foo**"])
def test_w1_patterns_that_explode_elsewhere_are_followed_quickly(compiler: GrammarCompiler, text: str) -> None:
    """Case W1: no backtracking here, so these are ordinary, or end with an error of their own; nothing hangs."""
    guide = compiler.compile(regex(text)).result().new_guide()
    for _ in range(100):
        choices = allowed(guide) - {0}
        if guide.failure or not choices:
            break
        guide.consume(min(choices))
    assert guide.failure in (None, TOO_COMPLEX)


def test_equal_grammars_are_compiled_once_and_counted(folder: Path) -> None:
    compiler = GrammarCompiler(str(folder), VOCAB_SIZE, (0,))
    first = compiler.compile(json_schema({"type": "object"}))
    assert compiler.compile(json_schema({"type": "object"})) is first
    assert compiler.compile(json_schema({"type": "object"}, is_compact=True)) is not first
    first.result()
    for structured in (regex("("), regex("(")):
        with pytest.raises(InvalidRequestError):
            compiler.compile(structured).result()
    compiler.compile(json_schema({"type": "object"}, is_compact=True)).result()
    assert (compiler.num_compiled, compiler.num_refused) == (2, 1)
    assert compiler.seconds > 0
    compiler.close()


def test_the_cache_is_bounded_and_keeps_what_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cb_backend.engine.grammar.grammar_compiler.MAX_CACHED", 3)
    compiler = GrammarCompiler(str(folder), VOCAB_SIZE, (0,))
    used = compiler.compile(regex("used"))
    for number in range(8):
        compiler.compile(regex(f"x{number}")).result()
        assert compiler.compile(regex("used")) is used
    assert len(compiler._cache) == 3


# ---- tokenizers ----------------------------------------------------------------------------------------------------


def test_tokens_spell_their_bytes(tmp_path: Path) -> None:
    """Byte fallback: single bytes, spaces written as marks, special tokens apart."""
    kit = ByteFallbackKit(tmp_path, byte_fallback_backend(), CONFIG)
    table = TokenTable(tmp_path)
    assert [table.tokens[i] for i in kit.ids("▁Hello", "▁▁", b"\xe4", "中")] == [
        b" Hello",
        b"  ",
        b"\xe4",
        "中".encode(),
    ]
    assert table.special_token_ids == [0, 1, 2]
    compiler = GrammarCompiler(str(tmp_path), len(table.tokens) + 30, (2,))
    guide = compiler.compile(regex("中!")).result().new_guide()
    # The character as a token or its first byte; ids of the model's padding never.
    assert allowed(guide) <= {*kit.ids("中"), *kit.ids(b"\xe4")}
    for token_id in kit.ids(b"\xe4\xb8\xad", "!"):
        guide.consume(token_id)
    assert guide.is_complete and allowed(guide) == {2}  # noqa: PT018 one state


def test_tokenizers_of_converted_gguf_files(folder: Path, tmp_path: Path) -> None:
    """Their decoder names byte fallback before the byte-level one; tokens must still be read as byte-level."""
    from tokenizers import decoders

    backend = byte_level_backend(has_extra_token=False)
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    backend.decoder = decoders.Sequence(steps)
    kit = ByteLevelKit(tmp_path, backend, CONFIG)
    table = TokenTable(tmp_path)
    assert [table.tokens[i] for i in kit.ids(" world", b"\xf0")] == [b" world", b"\xf0"]


def test_what_a_deployment_must_have(tmp_path: Path, folder: Path) -> None:
    """Ids alone, a decoder without bytes, a model without an end: each is said with the remedy, once asked for."""
    backend = byte_fallback_backend()
    backend.decoder = decoders.Metaspace()
    Kit(tmp_path, backend, CONFIG)
    for place, eos, reason in [
        (tmp_path / "nothing", (0,), "needs the model's tokenizer: tokenizer.json is missing"),
        (tmp_path, (2,), "neither byte-level nor has byte fallback"),
        (folder, (), "needs an end-of-sequence token"),
    ]:
        with pytest.raises(InvalidRequestError, match=reason):
            GrammarCompiler(str(place), 300, eos).compile(regex("a")).result()
    with pytest.raises(ConfigError, match="neither byte-level"):
        TokenTable(tmp_path)


# ---- masks that take too long ------------------------------------------------------------------------------------


class StuckGuide:
    """A guide whose mask comes only when the test is over, or at once. Until then it computes, unless it is starved."""

    def __init__(self, is_over: threading.Event | None, is_starved: bool = False) -> None:
        self.is_over = is_over
        self.is_starved = is_starved
        self.failure: str | None = None

    def fill_mask(self, mask: np.ndarray) -> None:
        while self.is_over is not None and not self.is_over.wait(WAIT_S if self.is_starved else 0):
            pass
        mask[:] = 7

    def finish_mask(self, mask: np.ndarray) -> None:
        assert mask[0] == 7

    def give_up(self) -> None:
        self.failure = TOO_COMPLEX


def test_a_mask_that_takes_too_long_costs_its_own_request_only() -> None:
    """Two that are stuck among twenty; the threads they hold are replaced, and the next step finds others."""
    is_over = threading.Event()
    threads = MaskThreads(timeout_s=0.2)
    guides: list[Any] = [StuckGuide(is_over if index in (3, 4) else None) for index in range(20)]
    threads.fill(guides, np.zeros((20, 4), np.int32))
    assert [index for index, guide in enumerate(guides) if guide.failure] == [3, 4]
    others = [StuckGuide(None) for _ in range(18)]
    threads.fill(others, masks := np.zeros((18, 4), np.int32))  # type: ignore[arg-type]
    assert (masks == 7).all()
    is_over.set()
    threads.close()


def test_a_mask_whose_thread_does_not_get_to_run_is_waited_for() -> None:
    is_over = threading.Event()
    threads = MaskThreads(timeout_s=0.05)
    guides: list[Any] = [StuckGuide(is_over, is_starved=True), StuckGuide(None)]
    threading.Timer(0.5, is_over.set).start()
    threads.fill(guides, masks := np.zeros((2, 4), np.int32))
    assert [guide.failure for guide in guides] == [None, None]
    assert (masks == 7).all()
    threads.close()


def test_a_mask_that_cannot_be_computed_costs_its_own_request_only() -> None:
    class Broken(StuckGuide):
        def fill_mask(self, mask: np.ndarray) -> None:
            raise BaseException("a panic of the library")

    threads = MaskThreads(timeout_s=3600.0)
    guides: list[Any] = [Broken(None), StuckGuide(None)]
    threads.fill(guides, masks := np.zeros((2, 4), np.int32))
    assert [guide.failure for guide in guides] == [TOO_COMPLEX, None]
    assert (masks[1] == 7).all()
    threads.close()


def test_an_old_or_missing_library_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def __init__(self, tokenizer: object, n_vocab: int, eos_token: int) -> None:
            raise TypeError("argument 'eos_token': 'list' object cannot be interpreted as an integer")

    monkeypatch.setattr("llguidance.LLTokenizer", Old)
    with pytest.raises(CbError, match=r"needs llguidance, which is older than 1\.7") as caught:
        GrammarCompiler(str(folder), VOCAB_SIZE, (0,)).compile(regex("a")).result()
    assert caught.value.code is ErrorCode.UNSUPPORTED
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(CbError, match="needs llguidance, which is not installed"):
        GrammarCompiler(str(folder), VOCAB_SIZE, (0,)).compile(regex("a")).result()


def test_a_grammar_that_was_too_slow_once_is_refused_from_then_on(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(regex("too slow, say")).result()
    grammar.new_guide().give_up()
    with pytest.raises(InvalidRequestError, match="too complex to be followed"):
        grammar.new_guide()
