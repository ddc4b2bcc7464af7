"""Small tokenizers of the kinds that language models use, built with the `tokenizers` library, with readable tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as BackendTokenizer

from cb_backend.front_end.text.tokenizer import Tokenizer

# Tokens of several characters that the cases name, beside one token for every byte.
WORDS = ["DEF", "G", "HI", "J", " stop", "a b", "c!d", " world", "Hello", "x", "ok"]
CJK = "中".encode()  # e4 b8 ad
EMOJI = "😀".encode()  # f0 9f 98 80


def byte_characters() -> dict[int, str]:
    """Byte -> the character byte-level BPE writes for it, asked of the library and not of the code under test."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    table = {}
    for byte in range(0x80):
        table[byte] = pre_tokenizer.pre_tokenize_str(chr(byte))[0][0]
    for first, second in [*((0xC3, b) for b in range(0x80, 0xC0)), *((b, 0x80) for b in range(0xC2, 0xE0))]:
        written = pre_tokenizer.pre_tokenize_str(bytes((first, second)).decode())[0][0]
        table[first], table[second] = written
    rest = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(table.values()))
    # Bytes e0..f4 appear in longer characters; the alphabet writes c0, c1, f5..ff too, as themselves (Latin-1).
    for byte in range(0x100):
        if byte not in table:
            assert chr(byte) in rest
            table[byte] = chr(byte)
    return table


BYTE_CHARACTER = byte_characters()


def as_byte_level(data: bytes) -> str:
    return "".join(BYTE_CHARACTER[byte] for byte in data)


class Kit:
    """A loaded tokenizer, the library's own object beside it, and ids by readable names."""

    def __init__(self, folder: Path, backend: BackendTokenizer, config: dict[str, Any]) -> None:
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        self.folder = folder
        self.backend = backend
        self.tokenizer = Tokenizer(folder)

    def id(self, token: str) -> int:
        token_id = self.backend.token_to_id(token)
        assert token_id is not None, token
        return token_id

    def full_decode(self, ids: Iterable[int]) -> str:
        """The library's decoding of everything at once: the reference of all streams."""
        return self.backend.decode(list(ids), skip_special_tokens=True)


class ByteLevelKit(Kit):
    def ids(self, *tokens: str | bytes) -> list[int]:
        """Ids of whole tokens (str) and of single bytes (bytes)."""
        ids = []
        for token in tokens:
            if isinstance(token, bytes):
                ids += [self.id(BYTE_CHARACTER[byte]) for byte in token]
            else:
                ids.append(self.id(as_byte_level(token.encode())))
        return ids


class ByteFallbackKit(Kit):
    def ids(self, *tokens: str | bytes) -> list[int]:
        ids = []
        for token in tokens:
            if isinstance(token, bytes):
                ids += [self.id(f"<0x{byte:02X}>") for byte in token]
            else:
                ids.append(self.id(token))
        return ids


def byte_level_backend(*, has_bos: bool = True, has_extra_token: bool = True) -> BackendTokenizer:
    tokens = [*(BYTE_CHARACTER[byte] for byte in range(256))]
    tokens += [
        as_byte_level(word.encode()) for word in [*WORDS, "\ufffd"] if as_byte_level(word.encode()) not in tokens
    ]
    tokens += [as_byte_level(CJK[:2]), as_byte_level(EMOJI[1:])]
    backend = BackendTokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    # An added token that is text, with a character that the byte alphabet does not have (a space).
    if has_extra_token:
        backend.add_tokens([AddedToken("<think now>", special=False, normalized=False)])
    if has_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return backend


def byte_fallback_backend() -> BackendTokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁Hello", "▁world", "▁", "Hello", "stop", "x", "ab", "中", "▁▁", "!"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return backend


CONFIG = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True}}


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ByteLevelKit:
    return ByteLevelKit(tmp_path_factory.mktemp("byte_level"), byte_level_backend(), CONFIG)


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> ByteFallbackKit:
    return ByteFallbackKit(tmp_path_factory.mktemp("byte_fallback"), byte_fallback_backend(), CONFIG)


@pytest.fixture(scope="session")
def converted_byte_level(tmp_path_factory: pytest.TempPathFactory) -> ByteLevelKit:
    """Byte-level with the decoder that transformers writes when it converts a GGUF file's tokenizer."""
    backend = byte_level_backend(has_extra_token=False)
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    backend.decoder = decoders.Sequence(steps)
    return ByteLevelKit(tmp_path_factory.mktemp("converted"), backend, CONFIG)


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    """A decoder that is neither byte-level nor byte-fallback."""
    vocab = [(token, -float(i)) for i, token in enumerate(["<unk>", "▁Hello", "▁world", "▁", "!", "x", "\ufffd"])]
    backend = BackendTokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return Kit(tmp_path_factory.mktemp("metaspace"), backend, {"eos_token": "</s>"})


@pytest.fixture
def make_byte_level(tmp_path: Path) -> Callable[..., ByteLevelKit]:
    """Builds byte-level tokenizers with another `tokenizer_config.json`, or without a BOS."""

    def make(config: dict[str, Any], *, has_bos: bool = True) -> ByteLevelKit:
        return ByteLevelKit(tmp_path, byte_level_backend(has_bos=has_bos), config)

    return make
