"""Token ids to text while they arrive: each push returns the text that is complete, and no half character ever.

Whatever the pushes, the joined text equals the decoding of all ids at once (`MAX_HELD_RUN_BYTES` and `_WholeStream`
tell the exceptions). The library's own `DecodeStream` was measured against that (tokenizers 0.23) and is not used: it
holds back a real U+FFFD until the next token, costs 460 us a token on a run of 3,000 bytes that are not UTF-8 (it
decodes the run again for each), and raises "Invalid prefix encountered" when a byte-fallback tokenizer makes a run of
bytes invalid after the fact. This module does not know stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.support.token_pieces import DecoderKind, TokenPieces

REPLACEMENT = "\ufffd"
# A byte-fallback run is decoded as a whole: one bad byte turns all of it into replacement characters. To equal
# that, a run is held until it ends, but no longer than this many bytes, or a script that the vocabulary lacks would
# not stream at all. Beyond it, characters that are complete are let go.
MAX_HELD_RUN_BYTES = 48
_MAX_HELD_WINDOW_TOKENS = 4  # no character has more bytes
_NUM_CONTEXT_TOKENS = 4
# Of decoders that rewrite what stands there already: text is shown once so many later tokens have left it alone.
_NUM_SETTLING_TOKENS = 4
_MAX_WHOLE_TOKENS = 64  # decoded at each push; half of them go when there are more
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class _Stream(Protocol):
    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """The output text of one request. Holds a few bytes of state and nothing outside itself, so it dies with it.

    With `prompt_ids` the output is read as the prompt's continuation: the space that begins the first word stays,
    where the decoding of the output alone would strip it. Unknown ids have no text, nor have special tokens unless
    `skips_special` is false. Without `spaces_between_added`, added tokens that follow each other stand without the
    space that some decoders put between any two tokens (word pieces); the other kinds put none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skips_special: bool = True,
        spaces_between_added: bool = True,
    ) -> None:
        pieces = tokenizer.pieces if skips_special else tokenizer.all_pieces
        self._stream: _Stream
        if pieces.kind is DecoderKind.BYTES:
            self._stream = _BytesStream(pieces)
        elif pieces.kind is DecoderKind.FALLBACK:
            self._stream = _FallbackStream(pieces, prompt_ids)
        elif pieces.kind is DecoderKind.WHOLE:
            self._stream = _WholeStream(pieces, prompt_ids)
        else:
            self._stream = _WindowStream(pieces, prompt_ids, spaces_between_added)

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that `token_ids` complete; may be empty. Cost: proportional to the tokens pushed."""
        return self._stream.push(token_ids)

    def flush(self) -> str:
        """End of the output: what is still held, cut-off bytes as replacement characters. Only once."""
        return self._stream.flush()


class _BytesStream:
    def __init__(self, pieces: TokenPieces) -> None:
        self._piece = pieces.as_bytes.__getitem__
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._piece, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _FallbackStream:
    def __init__(self, pieces: TokenPieces, prompt_ids: Sequence[int]) -> None:
        self._piece = pieces.as_text.__getitem__
        self._run = bytearray()  # byte tokens since the last token of characters, not shown yet
        self._is_run_broken = False  # the run is known not to be UTF-8: each further byte is a replacement character
        is_continuation = any(self._piece(token_id) is not None for token_id in prompt_ids)
        self._num_spaces_to_strip = 0 if is_continuation else pieces.num_leading_spaces_stripped

    def push(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        for piece in map(self._piece, token_ids):
            if isinstance(piece, str):
                if self._run or self._is_run_broken:
                    parts.append(self._end_run())
                parts.append(piece)
            elif piece is not None:
                self._run.append(piece)
                if self._is_run_broken or len(self._run) >= MAX_HELD_RUN_BYTES:
                    parts.append(self._release_run())
        return self._strip("".join(parts))

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _release_run(self) -> str:
        """Let go of what the run has so far, except for the bytes of a character that is not complete."""
        try:
            if self._is_run_broken:
                raise ValueError
            text, num_bytes = codecs.utf_8_decode(bytes(self._run), "strict", False)
        except ValueError:
            self._is_run_broken = True
            text, num_bytes = REPLACEMENT * len(self._run), len(self._run)
        del self._run[:num_bytes]
        return text

    def _end_run(self) -> str:
        try:
            text = REPLACEMENT * len(self._run) if self._is_run_broken else self._run.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        self._is_run_broken = False
        return text

    def _strip(self, text: str) -> str:
        while self._num_spaces_to_strip and text:
            if text[0] != " ":
                self._num_spaces_to_strip = 0
            else:
                text = text[1:]
                self._num_spaces_to_strip -= 1
        return text


class _WindowStream:
    """Decodes the last few tokens with and without the new ones; the difference is the new text."""

    def __init__(self, pieces: TokenPieces, prompt_ids: Sequence[int], spaces_between_added: bool) -> None:
        self._pieces = pieces
        self._joined_ids = frozenset() if spaces_between_added else pieces.added_ids
        self._is_last_joined = False
        tail = [int(token_id) for token_id in prompt_ids[-_NUM_CONTEXT_TOKENS:]]
        self._context = [token_id for token_id in tail if pieces.visible_token(token_id) is not None]
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token_id in map(int, token_ids):
            if self._pieces.visible_token(token_id) is None:
                continue
            self._held.append(token_id)
            text = self._held_text()
            is_joined = token_id in self._joined_ids
            if is_joined and self._is_last_joined:
                text = text.removeprefix(" ")
            self._is_last_joined = is_joined
            if not text.endswith(REPLACEMENT) or len(self._held) >= _MAX_HELD_WINDOW_TOKENS:
                parts.append(text)
                self._let_go()
        return "".join(parts)

    def flush(self) -> str:
        text = self._held_text()
        self._let_go()
        return text

    def _held_text(self) -> str:
        if not self._held:
            return ""
        decode, skips_special = self._pieces.backend.decode, not self._pieces.shows_special
        before = str(decode(self._context, skip_special_tokens=skips_special))
        after = str(decode(self._context + self._held, skip_special_tokens=skips_special))
        return after[len(before) :]

    def _let_go(self) -> None:
        if self._held:
            self._context = (self._context + self._held)[-_NUM_CONTEXT_TOKENS:]
            self._held = []


class _WholeStream:
    """For decoders whose steps read the joined text: a later token may change what earlier ones read like.

    A text comes out when the next few tokens have left it as it is; so all is equal to the decoding at once unless a
    step reaches further back than these.
    """

    def __init__(self, pieces: TokenPieces, prompt_ids: Sequence[int]) -> None:
        self._pieces = pieces
        tail = [int(token_id) for token_id in prompt_ids[-_MAX_WHOLE_TOKENS // 2 :]]
        self._ids = [token_id for token_id in tail if pieces.visible_token(token_id) is not None]
        text = self._decoded(self._ids)
        self._num_shown = len(text)  # characters of the decoding of `_ids`
        self._texts = [text]  # after each of the last few tokens

    def push(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token_id in map(int, token_ids):
            if self._pieces.visible_token(token_id) is None:
                continue
            self._ids.append(token_id)
            self._texts.append(self._decoded(self._ids))
            if len(self._texts) > _NUM_SETTLING_TOKENS:
                settled = _common_start(self._texts).rstrip(REPLACEMENT)
                parts.append(settled[self._num_shown :])
                self._num_shown = max(self._num_shown, len(settled))
                del self._texts[0]
            if len(self._ids) > _MAX_WHOLE_TOKENS:
                self._forget()
        return "".join(parts)

    def flush(self) -> str:
        text = self._texts[-1][self._num_shown :]
        self._num_shown = len(self._texts[-1])
        return text

    def _forget(self) -> None:
        """Let go of the older half where the newer one, by itself, reads as it did behind it."""
        num_forgotten = _MAX_WHOLE_TOKENS // 2
        num_texts = len(self._texts)
        ids = self._ids[num_forgotten:]
        texts = [self._decoded(ids[: len(ids) - behind]) for behind in reversed(range(num_texts))]
        num_removed = len(self._texts[-1]) - len(texts[-1])
        num_shown = self._num_shown - num_removed
        tails = [text[self._num_shown :] for text in self._texts]
        if num_shown >= 0 and [text[num_shown:] for text in texts] == tails:
            self._ids, self._texts, self._num_shown = ids, texts, num_shown

    def _decoded(self, ids: list[int]) -> str:
        try:
            return str(self._pieces.backend.decode(ids, skip_special_tokens=not self._pieces.shows_special))
        except BaseException as error:
            # NOTE: a last step that strips more than there is panics (tokenizers 0.23), and a panic is no Exception.
            if type(error).__name__ != "PanicException":
                raise
            return ""


def _common_start(texts: list[str]) -> str:
    first, last = min(texts), max(texts)  # in the order of strings, what these share all share
    for at, (a, b) in enumerate(zip(first, last, strict=False)):
        if a != b:
            return first[:at]
    return first
