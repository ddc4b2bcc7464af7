"""A tokenizer's files as the `tokenizers` library's own object, with every special token that they name.

What both sides of the house need of a checkpoint's tokenizer: the front end turns text into ids with it, the engine
learns what each id spells. Which file goes before which is as transformers has it: `tokenizer_config.json` with an
`added_tokens_decoder` says everything; one without is older, and `special_tokens_map.json` and `added_tokens.json` go
with it. This module knows neither transformers (which pulls torch in) nor requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer

from cb_backend.contracts.errors import ConfigError
from cb_backend.support.git_lfs import refuse_lfs_pointer
from cb_backend.support.json_files import read_json_object

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONVERSION_NOTE = "conversion.json"  # in a converted checkpoint's folder: by which version, and why without a tokenizer
_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA = "extra_special_tokens"
_FORMER_EXTRA = "additional_special_tokens"  # what transformers called them before version 5
# Names that a tokenizer's class knows where no file says them.
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
_ENDOFTEXT = "<|endoftext|>"
_CLASS_TOKENS = {
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "GemmaTokenizer": _GEMMA,
    "GPT2Tokenizer": {"bos_token": _ENDOFTEXT, "eos_token": _ENDOFTEXT, "unk_token": _ENDOFTEXT},
    "Qwen2Tokenizer": {"eos_token": _ENDOFTEXT, "unk_token": _ENDOFTEXT, "pad_token": _ENDOFTEXT},
}


def load_tokenizer(folder: Path) -> tuple[BackendTokenizer, dict[str, Any]]:
    """The tokenizer in `folder`, special tokens included, and its configuration: `tokenizer_config.json` and what the
    older files beside it add.

    Raises `ConfigError` when it is missing or cannot be read.
    """
    backend = _load_backend(folder / "tokenizer.json")
    config = _read_json_object(folder / "tokenizer_config.json")
    _rename_extra(config)
    listed = _listed_tokens(config)
    if listed is None:
        _merge_special_tokens_map(config, _read_json_object(folder / "special_tokens_map.json"))
        listed = _read_added_tokens(folder / "added_tokens.json", backend, config)
    _name_class_tokens(config, backend)
    _add_tokens(backend, listed, config)
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    return backend, config


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens that have a name, as templates know them: `bos_token`, `image_token`, ...

    `config`: as `load_tokenizer` gives it.
    """
    texts = {name: token_text(value) for name, value in _named_values(config).items()}
    return {name: text for name, text in texts.items() if text is not None}


def token_text(value: Any) -> str | None:
    """A special token's text: a plain string, or the dictionary of an added token."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def why_no_tokenizer(folder: Path) -> str | None:
    """The reason that the conversion of a checkpoint noted for leaving out its tokenizer. Raises `ConfigError` for a
    broken note.
    """
    note = folder / CONVERSION_NOTE
    return read_json_object(note).get("no_tokenizer") if note.is_file() else None


def _load_backend(path: Path) -> BackendTokenizer:
    if not path.is_file():
        if reason := why_no_tokenizer(path.parent):
            raise ConfigError(reason)
        raise ConfigError(
            "tokenizer.json is missing in the tokenizer's folder; convert the tokenizer once with transformers:"
            " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), or name another one in 'tokenizer'"
        )
    refuse_lfs_pointer(path)
    try:
        backend = BackendTokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"tokenizer.json cannot be read by tokenizers: {error}") from None
    # Files saved from training carry both; a request must neither be cut nor padded silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json_object(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _rename_extra(config: dict[str, Any]) -> None:
    if _FORMER_EXTRA in config:
        former = config.pop(_FORMER_EXTRA)
        config.setdefault(_EXTRA, former)


def _listed_tokens(config: dict[str, Any]) -> list[AddedToken] | None:
    """The tokens of `added_tokens_decoder` in the order of their ids; None where the configuration has no such list."""
    if "added_tokens_decoder" not in config:
        return None
    listed = config["added_tokens_decoder"] or {}
    try:
        return [_added_token(listed[token_id]) for token_id in sorted(listed, key=int)]
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"tokenizer_config.json: added_tokens_decoder cannot be read: {error!r}") from None


def _added_token(value: dict[str, Any]) -> AddedToken:
    return AddedToken(value["content"], **{name: value[name] for name in _ADDED_TOKEN_FLAGS if name in value})


def _merge_special_tokens_map(config: dict[str, Any], special: dict[str, Any]) -> None:
    """The map goes before the configuration; lists of extra tokens are joined."""
    if isinstance(special.get(_EXTRA), list) and isinstance(config.get(_EXTRA) or [], list):
        known = config.get(_EXTRA) or []
        more = [token | {"special": True} if isinstance(token, dict) else token for token in special[_EXTRA]]
        special = {**special, _EXTRA: [*known, *(token for token in more if token not in known)]}
    config |= special
    _rename_extra(config)


def _read_added_tokens(path: Path, backend: BackendTokenizer, config: dict[str, Any]) -> list[AddedToken]:
    """Tokens of `added_tokens.json` (text -> id) in the order of their ids; what `tokenizer.json` says goes before."""
    ids = _read_json_object(path)
    present = backend.get_added_tokens_decoder()
    extra = config.get(_EXTRA)
    special = {token_text(config.get(name)) for name in NAMED_SPECIAL_TOKENS}
    special |= {token_text(token) for token in extra} if isinstance(extra, list) else set()
    try:
        texts = sorted((text for text, token_id in ids.items() if int(token_id) not in present), key=ids.__getitem__)
    except (TypeError, ValueError):
        raise ConfigError("added_tokens.json must hold an object of tokens and their ids") from None
    return [AddedToken(text, normalized=text not in special, special=text in special) for text in texts]


def _name_class_tokens(config: dict[str, Any], backend: BackendTokenizer) -> None:
    """Names that only the tokenizer's class knows, where its vocabulary has them."""
    name = config.get("tokenizer_class")
    defaults = _CLASS_TOKENS.get(name.removesuffix("Fast"), {}) if isinstance(name, str) else {}
    for attribute, text in defaults.items():
        if attribute not in config and backend.token_to_id(text) is not None:
            config[attribute] = text


def _named_values(config: dict[str, Any]) -> dict[str, Any]:
    """Name -> text or dictionary of the tokens that have one, in transformers' order."""
    extra = config.get(_EXTRA)
    others = {name: value for name, value in config.items() if name.endswith("_token")}
    values = {**{name: config.get(name) for name in NAMED_SPECIAL_TOKENS}, **others}
    return values | extra if isinstance(extra, dict) else values


def _add_tokens(backend: BackendTokenizer, listed: list[AddedToken], config: dict[str, Any]) -> None:
    """Add what `tokenizer.json` lacks, in transformers' order, which decides the ids: listed, named, then extra."""
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    named, extra = _named_values(config), config.get(_EXTRA)
    named_texts = {token_text(value) for value in named.values()}
    missing: dict[str, AddedToken] = {}
    for token in listed:
        known = present.get(token.content)
        if known is None:
            token.special = token.special or token.content in named_texts
        else:
            # NOTE: the library goes on to leave out the text of a token that was special, whatever it is told later.
            token.special = token.special or known.special
        if known is None or repr(known) != repr(token):
            missing[token.content] = token
    forced = [(value, {"special": True}) for value in named.values()]
    for value, flags in [*forced, *((value, {}) for value in (extra if isinstance(extra, list) else ()))]:
        text = token_text(value)
        if text is not None and text not in present and text not in missing:
            default = {"content": text, "special": True}
            missing[text] = _added_token((value if isinstance(value, dict) else default) | flags)
    backend.add_tokens([*missing.values()])
