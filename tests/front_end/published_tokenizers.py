"""Tokenizers and chat templates in the shapes in which people publish them, each compared with transformers.

A case is `(name, build, check)`: `build` writes the folder, `check` raises `AssertionError` where the two differ in
the ids of texts, in the names of special tokens, in the ids of rendered chats or in what streams as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import LlamaTokenizer, Qwen2Tokenizer

from tests.front_end.conftest import byte_fallback_backend, byte_level_backend
from tests.front_end.published_case import CHATML, PLAIN, Case, case, chatml_byte_level
from tests.front_end.published_templates import published_templates

_IMAGE = "{{ image_token }}{{ mask_token }}" + PLAIN
_BRACKETS = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
_FLAGGED = {"content": "<extra>", "lstrip": True, "normalized": False, "rstrip": True, "single_word": False}


def published_tokenizers() -> Iterator[Case]:
    yield from _special_token_cases()
    yield from _class_cases()
    yield from _decoder_cases()
    yield from published_templates()


def _special_token_cases() -> Iterator[Case]:
    """`tokenizer_config.json` without and with names, and the older files beside it."""
    extra = [_FLAGGED | {"__type": "AddedToken"}, "<|tool|>"]
    listed = {"300": _FLAGGED | {"special": True}, "301": _BRACKETS | {"special": False}}
    images = {"mask_token": "<m>", "chat_template": _IMAGE}
    image_names = {"image_token": "<image>", "x_token": "<extra>"}
    tool_bos = {"bos_token": "<|tool|>", "eos_token": "</s>"}
    in_map = {"extra_special_tokens": ["<image>", "<|tool|>"]}
    config: dict[str, Any]
    for name, config, special_map, added in [
        ("named-in-map", {}, CHATML, None),
        ("map-of-objects", {}, CHATML | {"eos_token": _BRACKETS}, None),
        ("map-over-config", tool_bos, CHATML, None),
        ("map-with-additional", {}, CHATML | {"additional_special_tokens": ["<|tool|>"]}, None),
        ("map-ignored", CHATML | {"added_tokens_decoder": listed}, tool_bos, None),
        ("additional", CHATML | {"additional_special_tokens": extra}, None, None),
        ("extra-list", CHATML | {"extra_special_tokens": extra}, None, None),
        ("extra-named", CHATML | images | {"extra_special_tokens": image_names}, None, None),
        ("own-names", CHATML | images | image_names, None, None),
        (
            "extra-in-both",
            CHATML | {"extra_special_tokens": extra},
            in_map,
            None,
        ),
        ("added-tokens-file", CHATML, None, {"<|tool|>": 300, "<extra>": 299, "<|im_end|>": 298}),
        ("added-and-map", {}, CHATML | {"extra_special_tokens": ["<image>"]}, {"<image>": 300, "<|im_end|>": 298}),
    ]:
        files: dict[str, Any] = {"tokenizer_config.json": {"chat_template": PLAIN, **config}}
        files |= {} if special_map is None else {"special_tokens_map.json": special_map}
        files |= {} if added is None else {"added_tokens.json": added}
        yield case(name, bare_byte_level, files)
    flags = _BRACKETS | {"content": "<|im_start|>", "lstrip": True, "special": True}
    yield case(
        "other-flags", chatml_byte_level, {"tokenizer_config.json": CHATML | {"added_tokens_decoder": {"272": flags}}}
    )
    yield case("split-special", chatml_byte_level, {"tokenizer_config.json": CHATML | {"split_special_tokens": True}})


def _class_cases() -> Iterator[Case]:
    """Names that only the tokenizer's class knows."""
    llama = {"tokenizer_class": "LlamaTokenizer", "chat_template": PLAIN}
    yield case("class-llama", llama_shaped, {"tokenizer_config.json": llama}, reference=LlamaTokenizer)
    qwen = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "chat_template": PLAIN}
    yield case("class-qwen2", qwen_shaped, {"tokenizer_config.json": qwen}, reference=Qwen2Tokenizer)


def _decoder_cases() -> Iterator[Case]:
    replace, regex = decoders.Replace, Regex
    fallback = [decoders.ByteFallback(), decoders.Fuse()]
    config = {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}}
    for name, decoder in [
        ("decoder-regex", decoders.Sequence([replace(regex("▁+"), " "), *fallback, decoders.Strip(" ", 1, 0)])),
        ("decoder-two-regexes", decoders.Sequence([replace(regex("^▁"), " "), replace(regex("[Hx]"), "é"), *fallback])),
        ("decoder-regex-behind", decoders.Sequence([replace("▁", " "), *fallback, replace(regex(r" ([!x])"), "<>")])),
        ("decoder-nested", decoders.Sequence([decoders.Sequence([replace("▁", " "), fallback[0]]), fallback[1]])),
        ("decoder-metaspace", decoders.Metaspace()),
        ("decoder-word-pieces", decoders.WordPiece("##", True)),
        ("decoder-bpe", decoders.BPEDecoder("</w>")),
    ]:
        yield case(name, lambda decoder=decoder: with_decoder(byte_fallback_backend(), decoder), config)
    byte_level = decoders.Sequence([decoders.ByteLevel(), replace(regex(" +"), " ")])
    yield case("decoder-byte-level-regex", lambda: with_decoder(byte_level_backend(), byte_level), config)
    behind = decoders.Sequence([replace(regex("Ġ"), "_"), decoders.ByteLevel()])
    yield case(
        "decoder-regex-byte-level", lambda: with_decoder(byte_level_backend(has_extra_token=False), behind), config
    )


def bare_byte_level() -> BackendTokenizer:
    """Byte-level, with no added token in `tokenizer.json`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Hello", "Ġworld", "<|im_start|>", "</s>", "<s>"]  # some are in the vocabulary, and added nevertheless
    vocab = {token: i for i, token in enumerate([*alphabet, *words])}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def with_decoder(backend: BackendTokenizer, decoder: Any) -> BackendTokenizer:
    backend.decoder = decoder
    return backend


def llama_shaped() -> BackendTokenizer:
    backend = byte_fallback_backend()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    return backend


def qwen_shaped() -> BackendTokenizer:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    backend = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[]).backend_tokenizer
    assert isinstance(backend, BackendTokenizer)
    return backend
