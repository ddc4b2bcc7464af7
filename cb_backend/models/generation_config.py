"""What a checkpoint's `generation_config.json` says: where answers end, and how its makers would sample.

The sampling defaults are read only where a deployment asks for them; every request may still say otherwise.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from cb_backend.contracts.errors import ConfigError, InvalidRequestError
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.models.config_reader import ConfigReader
from cb_backend.support.json_files import read_json_object

NAME = "generation_config.json"
_KINDS: dict[str, type] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float,
    "max_new_tokens": int,
}  # fmt: skip
_OUR_NAMES = {"max_new_tokens": "max_tokens"}


def read_generation_eos_ids(folder: Path) -> tuple[int, ...]:
    """The file's end-of-sequence ids; none where it is missing or names none. Raises `ConfigError`."""
    reader = _open(folder)
    return () if reader is None else reader.token_ids("eos_token_id")


def read_sampling_defaults(folder: Path, vocab_size: int) -> dict[str, float]:
    """Sampling parameters by the names of requests, as the file sets them; empty where it is missing.

    `do_sample` false without a temperature means greedy, as in transformers. Raises `ConfigError` for a value that no
    request could have.
    """
    reader = _open(folder)
    if reader is None:
        return {}
    given = {key: reader.get(key, kind, None) for key, kind in _KINDS.items()}
    defaults = {_OUR_NAMES.get(key, key): value for key, value in given.items() if value is not None}
    if not reader.get("do_sample", bool, True):
        defaults.setdefault("temperature", 0.0)
    try:
        msgspec.convert(defaults, TokenRules, strict=False).check(vocab_size)
    except (InvalidRequestError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{NAME}: {error}; correct it, or remove the engine argument generation_config 'auto'"
        ) from None
    return defaults


def _open(folder: Path) -> ConfigReader | None:
    path = folder / NAME
    return ConfigReader(read_json_object(path), NAME) if path.is_file() else None
