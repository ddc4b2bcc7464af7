"""What a GGUF file's metadata says of its tokens: texts, kinds, special ones, ends of an answer, chat templates.

Ids are checked against the list of tokens here, so that none reaches an index or a grammar unchecked. This module
builds no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.gguf.pre_tokenizers import adds_bos_by_default
from cb_backend.models.gguf.source import GgufSource

SENTENCEPIECE = "llama"  # values of tokenizer.ggml.model
BYTE_LEVEL = "gpt2"

_NO_ID = (-1, 0xFFFFFFFF)  # writers say so that there is no such token
_KEYS = {
    "bos": "bos_token_id", "eos": "eos_token_id", "eot": "eot_token_id", "eom": "eom_token_id",
    "unk": "unknown_token_id", "pad": "padding_token_id",
}  # fmt: skip
# Control tokens that end a turn in every model that has them; most files name one of a model's several ends.
_ENDS_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")


class TokenType(IntEnum):
    """What a token is, in the numbers of the format."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of one model; empty where the file holds no tokenizer."""

    model: str  # SENTENCEPIECE, BYTE_LEVEL, or the name of one that cannot be converted
    pre: str | None  # name of the rule by which a byte-level text is first cut into words
    tokens: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)  # of TokenType, one a token
    scores: list[float] = field(default_factory=list)  # sentencepiece
    merges: list[str] = field(default_factory=list)  # byte-level: "left right"
    special_ids: dict[str, int] = field(default_factory=dict)  # bos, eos, eot, eom, unk, pad: those there are
    end_ids: tuple[int, ...] = ()  # each ends an answer; the file's eos first
    adds_bos: bool
    adds_eos: bool
    adds_space_prefix: bool
    templates: dict[str, str] = field(default_factory=dict)  # "default" and others -> source text

    def token(self, name: str) -> str | None:
        """The text of a special token."""
        token_id = self.special_ids.get(name)
        return None if token_id is None or not self.tokens else self.tokens[token_id]

    def ids(self) -> dict[str, Any]:
        """The entries of `config.json` that name tokens."""
        ends = {"eos_token_id": list(self.end_ids)} if self.end_ids else {}
        return {
            f"{name}_token_id": self.special_ids[name] for name in ("bos", "pad") if name in self.special_ids
        } | ends


def read_vocabulary(source: GgufSource, vocab_size: int) -> Vocabulary:
    """`vocab_size`: the embedding's rows. Raises `ConfigError` for tokens or ids beyond it, naming key and value."""
    reader = ConfigReader(
        {key.removeprefix("tokenizer.ggml."): value for key, value in source.metadata.items()}, source.name
    )
    model, pre = reader.get("model", str, "none"), reader.get("pre", str, None)
    tokens = reader.get("tokens", list, [])
    if len(tokens) > vocab_size:
        raise ConfigError(
            f"{source.name} names {len(tokens)} tokens, but its embedding has {vocab_size} rows; fetch it again"
        )
    types = reader.get("token_type", list, None) or [TokenType.NORMAL] * len(tokens)
    scores = reader.get("scores", list, [])
    for key, values in (("token_type", types), ("scores", scores or tokens)):
        if len(values) != len(tokens):
            raise ConfigError(
                f"{source.name}: tokenizer.ggml.{key} has {len(values)} entries for {len(tokens)} tokens; fetch it "
                "again"
            )
    special_ids = _read_special_ids(reader, len(tokens) or vocab_size)
    if "unk" not in special_ids and TokenType.UNKNOWN in types:
        special_ids["unk"] = types.index(TokenType.UNKNOWN)
    is_sentencepiece = model == SENTENCEPIECE
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=scores,
        merges=reader.get("merges", list, []),
        special_ids=special_ids,
        end_ids=_end_ids(special_ids, tokens, types),
        adds_bos=reader.get("add_bos_token", bool, is_sentencepiece or adds_bos_by_default(pre)),
        adds_eos=reader.get("add_eos_token", bool, False),
        adds_space_prefix=reader.get("add_space_prefix", bool, is_sentencepiece),
        templates=_read_templates(source),
    )


def _read_special_ids(reader: ConfigReader, num_ids: int) -> dict[str, int]:
    found = {}
    for name, key in _KEYS.items():
        token_id = reader.get(key, int, -1)
        if token_id in _NO_ID:
            continue
        if not 0 <= token_id < num_ids:
            if name == "pad":  # nothing here pads
                continue
            raise ConfigError(
                f"{reader.where}: tokenizer.ggml.{key} is {token_id}, but there are {num_ids} tokens; mend the file's "
                "metadata or fetch it again"
            )
        found[name] = token_id
    return found


def _end_ids(special_ids: dict[str, int], tokens: list[str], types: list[int]) -> tuple[int, ...]:
    ends = [special_ids[name] for name in ("eos", "eot", "eom") if name in special_ids]
    is_control = (TokenType.CONTROL, TokenType.USER_DEFINED)
    ends += [i for i, token in enumerate(tokens) if token in _ENDS_OF_TURN and types[i] in is_control]
    return tuple(dict.fromkeys(ends))


def _read_templates(source: GgufSource) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in source.metadata.items()
        if key == prefix or key.startswith(prefix + ".")
    }
    return {name: text for name, text in found.items() if isinstance(text, str) and text}
