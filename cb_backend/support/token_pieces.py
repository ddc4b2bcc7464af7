"""What each token id adds to a text: bytes, or characters, looked up in a table that fills as ids are met.

The decoder section of a `tokenizer.json` says how tokens become text. Two kinds cover nearly every language model
and are cheap to follow one token at a time:

- BYTES: byte-level BPE. A token is a string of bytes; the text is their concatenation, decoded as UTF-8.
- FALLBACK: sentencepiece style. A token is a string of characters, or one byte of a character outside the
  vocabulary; a run of byte tokens is decoded as a whole.

The others only the library itself can read: WINDOW, where a few neighbouring tokens are enough to know what a token
reads like, and WHOLE, where a step of the decoder looks at the joined text (a replacement after Fuse, say) and may
change what stands there already. This module does not know requests or streams.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

from tokenizers import Regex, decoders
from tokenizers import Tokenizer as BackendTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecoderKind(Enum):
    BYTES = "bytes"
    FALLBACK = "fallback"
    WINDOW = "window"
    WHOLE = "whole"


class TokenPieces:
    """The pieces of one tokenizer. Tables only ever grow by equal values, so threads may share them."""

    kind: DecoderKind
    num_leading_spaces_stripped: int  # FALLBACK: spaces that the decoder strips off the start of a text
    special_ids: frozenset[int]
    added_ids: frozenset[int]  # special tokens and others that are no part of the trained vocabulary
    as_bytes: dict[int, bytes]  # BYTES: b"" for a token without text
    as_text: dict[int, str | int | None]  # FALLBACK: characters, a byte's value, or None for a token without text

    def __init__(self, backend: BackendTokenizer, shows_special: bool = False) -> None:
        """`shows_special`: special tokens are text like any other."""
        self.backend = backend
        self.shows_special = shows_special
        added = backend.get_added_tokens_decoder()
        special_texts = {token.content for token in added.values() if token.special}
        ids = {backend.token_to_id(text) for text in special_texts} | {i for i, t in added.items() if t.special}
        self.special_ids = frozenset(i for i in ids if i is not None)
        self.added_ids = self.special_ids | frozenset(added)
        steps = _decoder_steps(backend)
        self.num_leading_spaces_stripped = 0
        if _is_byte_level(steps, backend):
            self.kind = DecoderKind.BYTES
        elif _is_fallback(steps):
            self.kind = DecoderKind.FALLBACK
            if steps[-1]["type"] == "Strip":
                self.num_leading_spaces_stripped = steps[-1]["start"]
        else:
            self.kind = DecoderKind.WHOLE if _reads_joined_text(steps) else DecoderKind.WINDOW
        self.as_bytes = _BytesTable(self)
        replacements = [step for step in steps if step["type"] == "Replace"]
        self.as_text = _TextTable(self, replacements if self.kind is DecoderKind.FALLBACK else [])

    @property
    def has_bytes(self) -> bool:
        """Whether each token adds bytes of its own to a text, whatever stands around it."""
        return self.kind in (DecoderKind.BYTES, DecoderKind.FALLBACK)

    def visible_token(self, token_id: int) -> str | None:
        """The vocabulary's entry, or None for ids outside the vocabulary and special tokens that are not shown."""
        if not 0 <= token_id < 2**31 or (token_id in self.special_ids and not self.shows_special):
            return None
        token: str | None = self.backend.id_to_token(int(token_id))
        return token

    def bytes_of(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds inside a text; b"" for one without text. Only with `has_bytes`."""
        if self.kind is DecoderKind.BYTES:
            return self.as_bytes[token_id]
        piece = self.as_text[token_id]
        return bytes((piece,)) if isinstance(piece, int) else (piece or "").encode()


class _BytesTable(dict[int, bytes]):
    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces

    def __missing__(self, token_id: int) -> bytes:
        token = self._pieces.visible_token(token_id)
        if token is None:
            return b""  # not kept: ids outside the vocabulary must not fill memory
        try:
            piece = bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:  # an added token, written as itself
            piece = token.encode()
        self[int(token_id)] = piece
        return piece


class _TextTable(dict[int, "str | int | None"]):
    def __init__(self, pieces: TokenPieces, replacements: list[dict[str, Any]]) -> None:
        self._pieces = pieces
        self._replace = decoders.Sequence([_replacement(step) for step in replacements]) if replacements else None

    def __missing__(self, token_id: int) -> str | int | None:
        token = self._pieces.visible_token(token_id)
        if token is None:
            return None
        if self._replace is not None:
            token = str(self._replace.decode([token]))
        byte = _BYTE_TOKEN.fullmatch(token)
        piece = token if byte is None else int(byte[1], 16)
        self[int(token_id)] = piece
        return piece


def _decoder_steps(backend: BackendTokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    return _flat(json.loads(backend.decoder.__getstate__()))


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    return [inner for each in step["decoders"] for inner in _flat(each)] if step["type"] == "Sequence" else [step]


def _is_byte_level(steps: list[dict[str, Any]], backend: BackendTokenizer) -> bool:
    """Whether the decoder is byte-level, alone or (in converted GGUF files) after steps that the vocabulary never uses.

    NOTE: behind those steps the library gives a whole text undecoded once one added token has a character outside
    the byte alphabet (a space). The table decodes token by token and does not copy that.
    """
    types = [step["type"] for step in steps]
    if types == ["ByteLevel"]:
        return True
    if types[-1:] != ["ByteLevel"] or not {*types[:-1]} <= {"ByteFallback", "Fuse", "Replace"}:
        return False
    patterns = [step["pattern"].get("String") for step in steps if step["type"] == "Replace"]
    if not all(patterns):
        return False
    vocab = backend.get_vocab(with_added_tokens=True)
    return not any(_BYTE_TOKEN.fullmatch(token) or any(text in token for text in patterns) for token in vocab)


def _replacement(step: dict[str, Any]) -> decoders.Replace:
    pattern = step["pattern"]
    return decoders.Replace(pattern["String"] if "String" in pattern else Regex(pattern["Regex"]), step["content"])


def _reads_joined_text(steps: list[dict[str, Any]]) -> bool:
    """Whether a step sees more than one token at once: behind the one that joins all of them, or in a run of bytes."""
    types = [step["type"] for step in steps]
    joined = types.index("Fuse") if "Fuse" in types else len(types)
    return not {"ByteFallback", "ByteLevel"}.isdisjoint(types) or any(name != "Fuse" for name in types[joined + 1 :])


def _is_fallback(steps: list[dict[str, Any]]) -> bool:
    """Whether the decoder is: replacements, byte fallback, fuse, and perhaps a strip of leading spaces."""
    types = [step["type"] for step in steps]
    num_replacements = types.index("ByteFallback") if "ByteFallback" in types else len(types)
    if any(step["type"] != "Replace" for step in steps[:num_replacements]):
        return False
    if types[num_replacements:] == ["ByteFallback", "Fuse"]:
        return True
    is_stripping = types[num_replacements:] == ["ByteFallback", "Fuse", "Strip"]
    return is_stripping and steps[-1]["content"] == " " and steps[-1]["stop"] == 0


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where printable, else U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
