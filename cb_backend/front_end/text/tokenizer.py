"""Text to token ids, and what the rest of the front end must know of a tokenizer.

Reads `tokenizer.json` with the `tokenizers` library and the special tokens of `tokenizer_config.json`. It does not
know transformers (which pulls torch in), requests, or how output text is streamed (see `detokenizer`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as BackendTokenizer

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.front_end.text.template_files import read_chat_templates
from cb_backend.support.native_paths import native_path
from cb_backend.support.token_pieces import DecoderKind, TokenPieces
from cb_backend.support.tokenizer_files import load_tokenizer, named_tokens

# A normalizer may shrink text before it is cut into tokens: canonical composition makes 3 bytes of 9 at most.
_MAX_NORMALIZER_SHRINK = 4
_TAG = re.compile(r"[<\[{(].*[>\]})]", re.DOTALL)


class Tokenizer:
    """One checkpoint's tokenizer. Immutable after construction, shared by all threads of a front end."""

    bos_token: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # the tokenizer's own; the model may end on more
    chat_templates: dict[str, str]  # name -> source text; one without a name is called "default"
    named_tokens: dict[str, str]  # "bos_token", "eos_token", ... -> text, as templates know them
    control_tokens: dict[str, int]  # text -> id of tokens that no text may spell: special ones, and tags
    vocab_size: int  # highest token id + 1; the model's may be larger (padding)
    max_token_bytes: int  # bytes of the longest token
    adds_bos: bool  # in front of a text
    pieces: TokenPieces  # what each id adds to a text

    def __init__(self, folder: Path | str) -> None:
        """Read the tokenizer in `folder`. Raises `ConfigError` when it is missing or cannot be read."""
        # One text is encoded at a time: the library's pool of threads would idle, once per front end.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        folder = native_path(folder)
        self._backend, config = load_tokenizer(folder)
        self.named_tokens = named_tokens(config)
        self.bos_token = self.named_tokens.get("bos_token")
        self.bos_token_id = None if self.bos_token is None else self._backend.token_to_id(self.bos_token)
        eos_token = self.named_tokens.get("eos_token")
        eos_token_id = None if eos_token is None else self._backend.token_to_id(eos_token)
        self.eos_token_ids = () if eos_token_id is None else (eos_token_id,)
        self.chat_templates = read_chat_templates(folder, config)
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.max_token_bytes = max((len(token.encode()) for token in vocab), default=1)
        self.control_tokens = _control_tokens(self._backend)
        self._characters: BackendTokenizer | None = None
        self.adds_bos = self._backend.encode("").ids[:1] == [self.bos_token_id]
        self._has_normalizer = self._backend.normalizer is not None
        self.pieces = TokenPieces(self._backend)
        self._all_pieces: TokenPieces | None = None

    def encode(self, text: str, max_model_len: int | None = None, times: int = 1) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer's post-processor adds (usually BOS).

        - Special tokens spelled in the text become these tokens: a text on this path is trusted.
        - A text that already begins with the BOS string gets no second BOS: the client has rendered a template.
        - A text without any token becomes BOS alone; without a BOS it is refused.
        - With `max_model_len`, a text of more bytes than so many of the longest tokens could hold is refused before
          it is tokenised; one that will be truncated may be `times` as long. The exact check against the number of
          ids is the caller's.

        Raises `InvalidRequestError`. Safe to call from several threads; the interpreter lock is not held meanwhile.
        """
        if max_model_len is not None:
            self._check_size(text, max_model_len, times)
        ids = _encode(self._backend, text, adds_special=True)
        bos = self.bos_token_id
        if self.adds_bos and ids[1:2] == [bos]:
            return ids[1:]
        if ids:
            return ids
        if bos is None:
            raise InvalidRequestError("prompt is empty and this model has no BOS token to start from; send some text")
        return [bos]

    def encode_pair(self, text: str, pair: str, max_model_len: int, times: int = 1) -> list[int]:
        """Token ids of two texts that belong together, as the tokenizer's post-processor joins them.

        Lengths as in `encode`. Raises `InvalidRequestError`.
        """
        self._check_size(text + pair, max_model_len, times)
        return _encode(self._backend, (text, pair), adds_special=True)

    def encode_plain(self, text: str, max_model_len: int | None = None, times: int = 1) -> list[int]:
        """Token ids of a piece of text: nothing is added around it. Special tokens spelled in it become these.

        Lengths as in `encode`. Raises `InvalidRequestError` for them, and for lone surrogates.
        """
        if max_model_len is not None:
            self._check_size(text, max_model_len, times)
        return _encode(self._backend, text, adds_special=False)

    def encode_characters(self, text: str) -> list[int]:
        """Token ids of text in which nothing is a control token, whatever it spells. Raises `InvalidRequestError`."""
        if self._characters is None:
            state = json.loads(self._backend.to_str())
            state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] not in self.control_tokens]
            state["post_processor"] = None
            self._characters = BackendTokenizer.from_str(json.dumps(state))
        ids = _encode(self._characters, text, adds_special=False)
        if not {*self.control_tokens.values()}.isdisjoint(ids):
            raise InvalidRequestError("the text spells a control token that this tokenizer cannot write as plain text")
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text of `token_ids`; special tokens and ids unknown to the tokenizer add nothing.

        Spaces stay as they are: `clean_up_tokenization_spaces` of the configuration is not applied, as in vLLM.
        """
        known = [int(token_id) for token_id in token_ids if 0 <= token_id < self.vocab_size]
        return str(self._backend.decode(known, skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """As `decode`, with special tokens as they are written."""
        known = [int(token_id) for token_id in token_ids if 0 <= token_id < self.vocab_size]
        return str(self._backend.decode(known, skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special ones as they are written; broken characters become U+FFFD."""
        token_id = int(token_id)
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return ""
        if token_id in self.pieces.special_ids:
            return str(token)
        if self.pieces.kind is DecoderKind.BYTES:
            return self.pieces.as_bytes[token_id].decode(errors="replace")
        if self.pieces.kind is DecoderKind.FALLBACK:
            piece = self.pieces.as_text[token_id]
            return bytes((piece,)).decode(errors="replace") if isinstance(piece, int) else piece or ""
        # Decoders strip the space that a text begins with, so look at the token where it continues one.
        alone = str(self._backend.decode([token_id], skip_special_tokens=False))
        twice = str(self._backend.decode([token_id, token_id], skip_special_tokens=False))
        return twice[len(alone) :] if twice.startswith(alone) else alone

    @property
    def all_pieces(self) -> TokenPieces:
        """As `pieces`, with special tokens as text. Made at first use, by several threads at worst."""
        if self._all_pieces is None:
            self._all_pieces = TokenPieces(self._backend, shows_special=True)
        return self._all_pieces

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of decoded text (BOS, EOS, role marks)."""
        return token_id in self.pieces.special_ids

    def _check_size(self, text: str, max_model_len: int, times: int) -> None:
        shrink = _MAX_NORMALIZER_SHRINK if self._has_normalizer else 1
        limit = max_model_len * self.max_token_bytes * shrink * times
        # Characters first: each has at least one byte, and counting them costs nothing.
        num_bytes = len(text) if len(text) > limit else len(text.encode(errors="surrogatepass"))
        if num_bytes > limit:
            room = f"max_model_len={max_model_len} tokens (the longest token has {self.max_token_bytes} bytes)"
            if times > 1:
                room = f"{times} times {room}, and no more is read of a prompt that is to be truncated"
            raise InvalidRequestError(
                f"prompt has at least {num_bytes} bytes; at most {limit} can fit {room}; shorten the prompt"
            )


def _encode(backend: BackendTokenizer, text: str | tuple[str, str], adds_special: bool) -> list[int]:
    try:
        # NOTE: the batch call. The library's single call keeps the interpreter lock for the whole text (measured:
        # 1.2 MB stopped every other thread for 3.3 s; 13 ms with this).
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=adds_special)[0].ids
    except TypeError:
        raise InvalidRequestError("prompt holds lone surrogates, which are not characters") from None
    return ids


def _control_tokens(backend: BackendTokenizer) -> dict[str, int]:
    """Special tokens, and added ones in brackets (<tool_call>); other added tokens are text, runs of spaces say."""
    added = backend.get_added_tokens_decoder().items()
    return {token.content: i for i, token in added if token.special or _TAG.fullmatch(token.content)}
