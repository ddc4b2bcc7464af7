"""Words that must not come out, as the token sequences that spell them.

A word is spelled differently where a text begins, after a space, and inside other text; all these forms are forbidden.
"""

from __future__ import annotations

import msgspec

from cb_backend.errors import InvalidRequestError
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams

_BEFORE = "\n"  # stands for any text in front of a word that is no space


def with_bad_word_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """`params` with the token ids of its bad words. Raises `InvalidRequestError` for a word without tokens."""
    if not params.bad_words:
        return params
    forms = [form for word in params.bad_words for form in word_forms(word, tokenizer)]
    return msgspec.structs.replace(params, bad_words_token_ids=tuple(dict.fromkeys(forms)))


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
