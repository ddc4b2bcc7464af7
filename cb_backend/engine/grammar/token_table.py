"""What every token of a checkpoint's vocabulary spells, as llguidance wants to be told.

Byte-level vocabularies and those with byte fallback are known token by token, converted GGUF files included; the
library's own reading of `tokenizer.json` does not know the latter's decoders. This module knows no grammar.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cb_backend.contracts.errors import ConfigError
from cb_backend.support.token_pieces import TokenPieces
from cb_backend.support.tokenizer_files import load_tokenizer


class TokenTable:
    """The tokens' bytes, and the way back. The attributes are those that `llguidance.TokenizerWrapper` reads."""

    eos_token_id = 0  # given to the library apart: a model may end on several
    bos_token_id = None

    def __init__(self, folder: Path, eos_token_ids: Sequence[int] = ()) -> None:
        """`eos_token_ids`: the model's, which end an answer and so are no text, special or not.

        Raises `ConfigError` when there is no tokenizer in `folder`, or one that has no bytes for its tokens."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._backend, _ = load_tokenizer(folder)
        pieces = TokenPieces(self._backend)
        if not pieces.has_bytes:
            raise ConfigError("its decoder is neither byte-level nor has byte fallback; serve another tokenizer")
        num_ids = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.tokens = [pieces.bytes_of(token_id) for token_id in range(num_ids)]
        # Literal text of a grammar that spells such a token is characters: neither the trie nor the way back has it.
        self._special = pieces.special_ids | {i for i in eos_token_ids if i < num_ids}
        self.special_token_ids = sorted(self._special)
        self._backend.encode_special_tokens = True
        self._ids_of_bytes = {t: i for i, t in enumerate(self.tokens) if t and i not in self._special}
        self._longest_token = max(map(len, self._ids_of_bytes), default=1)
        for token_id in self.special_token_ids:
            self.tokens[token_id] = str(self._backend.id_to_token(token_id)).encode()

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids that spell exactly this piece of a text: how forced text is cut into tokens.

        As the tokenizer cuts it, by itself or behind a line break: many put a space in front of what they are given.
        Where neither gives back the text, the longest tokens that fit.
        """
        data = text if isinstance(text, bytes) else text.encode()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return self._longest(data)
        ids = self._encode(text)
        if self._spelled(ids) != data:
            before = self._encode("\n")
            behind = self._encode("\n" + text)
            ids = behind[len(before) :] if behind[: len(before)] == before else []
        return ids if self._spelled(ids) == data else self._longest(data)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _spelled(self, ids: list[int]) -> bytes | None:
        """The text of these tokens; none where one of them is special."""
        if not self._special.isdisjoint(ids):
            return None
        return b"".join(self.tokens[token_id] for token_id in ids)

    def _longest(self, data: bytes) -> list[int]:
        ids, begin = [], 0
        while begin < len(data):
            for end in range(min(len(data), begin + self._longest_token), begin, -1):
                if (token_id := self._ids_of_bytes.get(data[begin:end])) is not None:
                    ids.append(token_id)
                    break
            else:
                end = begin + 1  # a byte that no token spells
            begin = end
        return ids
