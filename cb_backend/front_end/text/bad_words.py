"""Words that must not come out, as the token sequences that spell them.

A word is spelled differently where a text begins, after a space, and inside other text; all these forms are forbidden.
"""

from __future__ import annotations

from collections.abc import Iterable

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.token_rules import MAX_BAD_WORD_TOKENS
from cb_backend.front_end.text.tokenizer import Tokenizer

_BEFORE = "\n"  # stands for any text in front of a word that is no space


def bad_word_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of all the words' forms. Raises `InvalidRequestError` for a word without tokens."""
    forms = [form for word in words for form in word_forms(word, tokenizer)]
    return tuple(dict.fromkeys(forms))


def word_forms(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The token sequences of a word: at the start of a text, after a space, and right behind other text."""
    word = word.lstrip(" ")
    before = tokenizer.encode_plain(_BEFORE)
    behind = tokenizer.encode_plain(_BEFORE + word)
    forms = [tokenizer.encode_plain(word), tokenizer.encode_plain(" " + word)]
    if behind[: len(before)] == before:
        forms.append(behind[len(before) :])
    unique = list(dict.fromkeys(tuple(form) for form in forms if form))
    if not word or not unique:
        raise InvalidRequestError(f"bad_words holds {word!r}, which has no tokens; remove it")
    longest = max(len(form) for form in unique)
    if longest > MAX_BAD_WORD_TOKENS:
        raise InvalidRequestError(
            f"a word of bad_words has {longest} tokens; at most {MAX_BAD_WORD_TOKENS} are allowed"
        )
    return unique
