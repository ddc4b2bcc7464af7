"""A tokenizer's files as the `tokenizers` library's own object, with every special token that they name.

What both sides of the house need of a checkpoint's tokenizer: the front end turns text into ids with it, the engine
learns what each id spells. It knows neither transformers (which pulls torch in) nor requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer

from cb_backend.errors import ConfigError
from cb_backend.git_lfs import refuse_lfs_pointer
from cb_backend.json_files import read_json_object

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONVERSION_NOTE = "conversion.json"  # in a converted checkpoint's folder: by which version, and why without a tokenizer
_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(folder: Path) -> tuple[BackendTokenizer, dict[str, Any]]:
    """The tokenizer in `folder`, special tokens included, and its `tokenizer_config.json`.

    Raises `ConfigError` when it is missing or cannot be read.
    """
    backend = _load_backend(folder / "tokenizer.json")
    config = _read_json_object(folder / "tokenizer_config.json")
    _add_special_tokens(backend, config)
    return backend, config


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
        backend = BackendTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"tokenizer.json cannot be read by tokenizers: {error}") from None
    # Files saved from training carry both; a request must neither be cut nor padded silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json_object(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _add_special_tokens(backend: BackendTokenizer, config: dict[str, Any]) -> None:
    """Make special what `tokenizer_config.json` names and `tokenizer.json` lacks, as transformers does."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: dict[str, AddedToken] = {}
    listed = config.get("added_tokens_decoder") or {}
    try:
        for token_id in sorted(listed, key=int):
            flags = {name: listed[token_id][name] for name in _ADDED_TOKEN_FLAGS if name in listed[token_id]}
            text = listed[token_id]["content"]
            missing[text] = AddedToken(text, **flags)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"tokenizer_config.json: added_tokens_decoder cannot be read: {error!r}") from None
    for name in NAMED_SPECIAL_TOKENS:
        named = token_text(config.get(name))
        if named is not None:
            missing.setdefault(named, AddedToken(named, special=True)).special = True
    backend.add_tokens([token for text, token in missing.items() if text not in present])


def token_text(value: Any) -> str | None:
    """A special token's text: a plain string, or the dictionary of an added token."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None
