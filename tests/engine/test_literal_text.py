"""Literal text of a grammar is characters, whatever it spells: no special token, and no end, stands for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer

from cb_backend.contracts.structured_output import StructuredOutput
from cb_backend.engine.grammar.grammar_compiler import GrammarCompiler
from cb_backend.engine.grammar.guide import Guide
from cb_backend.engine.grammar.token_table import TokenTable
from tests.front_end.conftest import byte_fallback_backend, byte_level_backend

SPECIAL = ["<|im_end|>", "<|tool|>", "</s>"]
PLAIN_END = "[END]"  # ends an answer, though the tokenizer does not call it special


class Kit:
    def __init__(self, folder: Path, backend: BackendTokenizer) -> None:
        backend.add_special_tokens(SPECIAL)
        backend.add_tokens([AddedToken(PLAIN_END, special=False, normalized=False)])
        backend.save(str(folder / "tokenizer.json"))
        self.backend = backend
        self.control_ids = {backend.token_to_id(text) for text in [*SPECIAL, PLAIN_END]}
        self.eos_ids = tuple(backend.token_to_id(text) for text in ("<|im_end|>", PLAIN_END))
        self.table = TokenTable(folder, self.eos_ids)
        self.compiler = GrammarCompiler(str(folder), len(self.table.tokens), self.eos_ids)


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kit:
    backend = byte_level_backend() if request.param == "byte_level" else byte_fallback_backend()
    return Kit(tmp_path_factory.mktemp(request.param), backend)


def allowed(guide: Guide) -> list[int]:
    mask = np.zeros(guide.num_mask_words, np.int32)
    guide.fill_mask(mask)
    guide.finish_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def answer(kit: Kit, structured: StructuredOutput, picks_last: bool) -> str:
    """What comes of always taking the first, or the last, token that is allowed."""
    guide = kit.compiler.compile(structured).result().new_guide()
    spelled = b""
    for _ in range(200):
        ids = [token_id for token_id in allowed(guide) if token_id not in kit.eos_ids]
        if not ids:
            break
        assert kit.control_ids.isdisjoint(ids)
        token_id = ids[-1 if picks_last else 0]
        spelled += kit.table.tokens[token_id]
        guide.consume(token_id)
        assert guide.failure is None
    assert guide.is_complete
    return spelled.decode()


LITERALS = ["<|im_end|>", "x<|tool|>y</s>", "[END] and more", "<|im_end|><|im_end|>", "<|im_"]


@pytest.mark.parametrize("picks_last", [False, True])
@pytest.mark.parametrize("literal", LITERALS)
def test_r30c_literal_text_is_characters(kit: Kit, literal: str, picks_last: bool) -> None:
    escaped = "".join(f"\\{c}" if c in "<|>[]/" else c for c in literal)
    structured = {
        literal: [
            StructuredOutput(kind="choice", text=json.dumps([literal])),
            StructuredOutput(kind="regex", text=escaped.replace("\\<", "<").replace("\\>", ">")),
            StructuredOutput(kind="grammar", text=f"start: {json.dumps(literal)}"),
            StructuredOutput(kind="grammar", text=f"root ::= {json.dumps(literal)}"),
        ],
        json.dumps(literal): [StructuredOutput(kind="json", text=json.dumps({"const": literal}))],
    }
    for expected, grammars in structured.items():
        for each in grammars:
            assert answer(kit, each, picks_last) == expected, each


def test_r30c_a_key_of_a_schema_is_characters(kit: Kit) -> None:
    schema = {
        "type": "object",
        "properties": {"<|tool|>": {"const": "[END]"}},
        "required": ["<|tool|>"],
        "additionalProperties": False,
    }
    structured = StructuredOutput(kind="json", text=json.dumps(schema), is_compact=True)
    assert json.loads(answer(kit, structured, False)) == {"<|tool|>": "[END]"}


def test_r30c_an_answer_still_ends_by_the_token(kit: Kit) -> None:
    guide = kit.compiler.compile(StructuredOutput(kind="choice", text='["ok<|im_end|>", "ok"]')).result().new_guide()
    for token_id in kit.table("ok"):
        guide.consume(token_id)
    assert {*kit.eos_ids} <= {*allowed(guide)}
    guide.consume(kit.eos_ids[0])
    assert guide.failure is None


@pytest.mark.parametrize("text", ["</s>", "a <|tool|> b", "x[END]", "plain"])
def test_r30c_forced_text_is_cut_into_tokens_that_spell_it(kit: Kit, text: str) -> None:
    ids = kit.table(text)
    assert kit.control_ids.isdisjoint(ids)
    assert b"".join(kit.table.tokens[token_id] for token_id in ids) == text.encode()
