"""A GGUF file's tokenizer as `tokenizer.json` and `tokenizer_config.json`: its own, or the original that is beside it.

Two kinds can be rebuilt: byte-level BPE, whose merges the file lists, and sentencepiece's BPE, whose merges follow
from the tokens' scores. What is written is read back and compared with the file, token by token.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.gguf.pre_tokenizers import apply_rule, find_rule
from cb_backend.models.gguf.source import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, GgufSource
from cb_backend.models.gguf.vocabulary import BYTE_LEVEL, SENTENCEPIECE, TokenType, Vocabulary
from cb_backend.support.json_files import read_json_object

_SPACE = "▁"  # sentencepiece's
_NAMED = ("bos", "eos", "unk", "pad")

_log = logging.getLogger(__name__)


def write_tokenizer(source: GgufSource, vocabulary: Vocabulary, folder: Path) -> None:
    """Raises `ConfigError` for a tokenizer that cannot be rebuilt."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.adds_bos,
        "add_eos_token": vocabulary.adds_eos,
    }
    original = source.beside.get(TOKENIZER)
    difference = None if original is None else _difference(_load(original), vocabulary)
    if original is not None and difference is None:
        shutil.copyfile(original, folder / TOKENIZER)
        if TOKENIZER_CONFIG in source.beside:
            config = read_json_object(source.beside[TOKENIZER_CONFIG])
    else:
        if difference is not None:
            _log.warning("the tokenizer.json beside %s is not its own (%s) and is not used", source.name, difference)
        tokenizer = _build(source, vocabulary)
        _check_framing(tokenizer, vocabulary)
        tokenizer.save(str(folder / TOKENIZER))
    config.update(_named_tokens(vocabulary) | _chat_templates(vocabulary))
    if CHAT_TEMPLATE in source.beside:
        shutil.copyfile(source.beside[CHAT_TEMPLATE], folder / CHAT_TEMPLATE)
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    _check(vocabulary, folder)


def _named_tokens(vocabulary: Vocabulary) -> dict[str, str]:
    return {f"{name}_token": text for name in _NAMED if (text := vocabulary.token(name)) is not None}


def _chat_templates(vocabulary: Vocabulary) -> dict[str, Any]:
    templates = vocabulary.templates
    if not templates:
        return {}
    if templates.keys() == {"default"}:
        return {"chat_template": templates["default"]}
    return {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}


def _build(source: GgufSource, vocabulary: Vocabulary) -> Tokenizer:
    if not vocabulary.tokens:
        raise ConfigError("it holds no tokenizer")
    if vocabulary.model == BYTE_LEVEL:
        tokenizer = _byte_level(vocabulary, source.architecture)
    elif vocabulary.model == SENTENCEPIECE:
        tokenizer = _sentencepiece(vocabulary)
    else:
        raise ConfigError(
            f"tokenizer.ggml.model is {vocabulary.model!r}; those that can be rebuilt are {BYTE_LEVEL!r} (byte-level) "
            f"and {SENTENCEPIECE!r} (sentencepiece)"
        )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=is_special)
                          for text, is_special in _added(vocabulary).items()])  # fmt: skip
    return tokenizer


def _byte_level(vocabulary: Vocabulary, architecture: str) -> Tokenizer:
    rule = find_rule(vocabulary.pre, architecture)
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    tokenizer = _bpe(vocabulary, merges, unk_token=vocabulary.token("unk"), ignore_merges=rule.ignores_merges)
    apply_rule(rule, tokenizer, vocabulary.adds_space_prefix)
    tokenizer.decoder = decoders.ByteLevel()
    steps = [processors.ByteLevel(trim_offsets=False), *_framing(vocabulary)]
    tokenizer.post_processor = processors.Sequence(steps) if len(steps) > 1 else steps[0]
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    from transformers.convert_slow_tokenizer import generate_merges

    if not vocabulary.scores:
        raise ConfigError("tokenizer.ggml.scores is missing")
    # Control tokens must not come of plain text, so nothing is merged into them.
    normal = [i for i, kind in enumerate(vocabulary.types) if kind == TokenType.NORMAL]
    ids = {vocabulary.tokens[i]: i for i in normal}
    merges = generate_merges(ids, {vocabulary.tokens[i]: vocabulary.scores[i] for i in normal})
    tokenizer = _bpe(vocabulary, merges, unk_token=vocabulary.token("unk"), fuse_unk=True, byte_fallback=True)
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.adds_space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    if framing := _framing(vocabulary):
        tokenizer.post_processor = framing[0]
    return tokenizer


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    ids = {text: i for i, text in enumerate(vocabulary.tokens) if not _is_padding(vocabulary, i)}
    try:
        return Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"tokenizer.ggml.merges do not fit its tokens ({error})") from None


def _frame(vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
    """The ids around a text: BOS before and EOS behind it, as far as the file asks for them and has them."""
    bos = [vocabulary.special_ids["bos"]] if vocabulary.adds_bos and "bos" in vocabulary.special_ids else []
    eos = [vocabulary.special_ids["eos"]] if vocabulary.adds_eos and "eos" in vocabulary.special_ids else []
    return bos, eos


def _framing(vocabulary: Vocabulary) -> list[processors.PostProcessor]:
    bos, eos = ([(vocabulary.tokens[i], i) for i in ids] for ids in _frame(vocabulary))
    if not bos and not eos:
        return []
    single = [*(text for text, _ in bos), "$A", *(text for text, _ in eos)]
    second = [*(f"{text}:1" for text, _ in bos), "$B:1", *(f"{text}:1" for text, _ in eos)]
    return [processors.TemplateProcessing(single=single, pair=[*single, *second], special_tokens=bos + eos)]


def _added(vocabulary: Vocabulary) -> dict[str, bool]:
    """Tokens that are found in a text before it is cut into words -> whether they are special."""
    added = {}
    for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        is_special = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token_id in vocabulary.special_ids.values()
        if is_special or (kind == TokenType.USER_DEFINED and not _is_padding(vocabulary, token_id)):
            added[text] = is_special
    return added


def _is_padding(vocabulary: Vocabulary, token_id: int) -> bool:
    """Rows of the embedding beyond the tokenizer, which writers of the format give names."""
    return vocabulary.types[token_id] != TokenType.NORMAL and vocabulary.tokens[token_id] == f"[PAD{token_id}]"


def _load(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"the {path.name} beside it cannot be read ({error}); mend it or move it away") from None


def _difference(tokenizer: Tokenizer, vocabulary: Vocabulary) -> str | None:
    """The first token on which the tokenizer and the file differ. Writers put spaces for sentencepiece's marks."""
    for token_id, text in enumerate(vocabulary.tokens):
        if _is_padding(vocabulary, token_id) or vocabulary.types[token_id] == TokenType.UNUSED:
            continue
        found = tokenizer.id_to_token(token_id)
        if found is None or found.replace(_SPACE, " ") != text.replace(_SPACE, " "):
            return f"id {token_id} is {found!r}, in the file {text!r}"
    return None


def _check(vocabulary: Vocabulary, folder: Path) -> None:
    """Read what was written: each token has its id, special ones are special, and each end has its name."""
    tokenizer = _load(folder / TOKENIZER)
    if (difference := _difference(tokenizer, vocabulary)) is not None:
        raise ConfigError(f"its tokens cannot be rebuilt ({difference}); a text occurs twice among them")
    config = read_json_object(folder / TOKENIZER_CONFIG)
    for name in _NAMED:
        text = config.get(f"{name}_token")
        token_id = vocabulary.special_ids.get(name)
        if vocabulary.tokens and token_id is not None and tokenizer.token_to_id(str(text)) != token_id:
            raise ConfigError(f"its {name} token {token_id} cannot be rebuilt: {text!r} stands for another one")


def _check_framing(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    bos, eos = _frame(vocabulary)
    if (found := tokenizer.encode("").ids) != bos + eos:
        raise ConfigError(f"what it puts around a text cannot be rebuilt: {bos + eos} became {found}")
