"""Bad words as token sequences, in every form that a tokenizer writes them."""

from __future__ import annotations

import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request_params import RequestParams
from cb_backend.front_end.text.bad_words import bad_word_ids, word_forms
from tests.front_end.conftest import ByteFallbackKit, ByteLevelKit


def test_k1_byte_level_has_a_form_with_a_space_and_one_without(byte_level: ByteLevelKit) -> None:
    """Case K1. A tokenizer without merges cuts words into bytes: the forms are sequences."""
    world = [token for character in b"world" for token in byte_level.ids(bytes([character]))]
    space = byte_level.ids(b" ")
    forms = word_forms("world", byte_level.tokenizer)
    assert set(forms) == {tuple(world), (*space, *world)}
    assert word_forms("  world", byte_level.tokenizer) == forms


def test_k1_sentencepiece_has_the_form_behind_other_text_too(byte_fallback: ByteFallbackKit) -> None:
    """A text begins with a space of the tokenizer's own there, so the form without one must be looked for."""
    kit = byte_fallback
    assert set(word_forms("x", kit.tokenizer)) == {
        tuple(kit.ids("▁", "x")),
        tuple(kit.backend.encode(" x", add_special_tokens=False).ids),
        tuple(kit.ids("x")),
    }


def test_the_rules_get_the_ids(byte_level: ByteLevelKit) -> None:
    ids = bad_word_ids(("x", "x", "ok"), byte_level.tokenizer)
    assert tuple(byte_level.ids(b"x")) in ids
    assert len(set(ids)) == len(ids) == 4
    (rules,) = RequestParams(bad_words=("x", "x", "ok")).token_rules(ids)
    assert rules.bad_words_token_ids == ids
    assert rules.has_logits_rules
    assert bad_word_ids((), byte_level.tokenizer) == ()


def test_words_of_too_many_tokens_are_refused(byte_level: ByteLevelKit) -> None:
    with pytest.raises(InvalidRequestError, match="a word of bad_words has 101 tokens; at most 64"):
        word_forms("y" * 100, byte_level.tokenizer)
    with pytest.raises(InvalidRequestError, match="has no tokens"):
        word_forms(" ", byte_level.tokenizer)
