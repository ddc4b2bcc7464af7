"""How a byte-level text is first cut into words: the rules behind the names that GGUF files give them.

The names are a convention between the writers and the readers of the format, the rules are those of the models'
original `tokenizer.json`. A name that is not known here is refused: another rule than the one the model was trained
with gives other tokens for the same text, which nobody would notice.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from cb_backend.contracts.errors import ConfigError

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%(contractions)s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%(contractions)s"
    r"|\p{N}%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """How words are cut, and what else the name implies."""

    pattern: str | None = None  # of one word; None: the rule of GPT-2
    cuts_digits: bool = False  # GPT-2's rule, with each digit a word of its own
    ignores_merges: bool = False  # a word that is a token is that token, whatever the merges say
    adds_bos: bool = False
    composes: bool = False  # canonical composition (NFC) first


_GPT2 = Rule()
_DIGITS = Rule(cuts_digits=True)
_LLAMA3 = Rule(_WORDS % "{1,3}", ignores_merges=True, adds_bos=True)
_THREE_DIGITS = Rule(_WORDS % "{1,3}")
_QWEN2 = Rule(_WORDS % "", composes=True)
_TEKKEN = Rule(_CASED_WORDS % {"contractions": "", "digits": ""}, ignores_merges=True, adds_bos=True)
_GPT4O = Rule(_CASED_WORDS % {"contractions": "(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "digits": "{1,3}"})

_RULES: dict[str, Rule] = {
    **dict.fromkeys(("gpt-2", "phi-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
# What files from before the names, or by writers who did not know the tokenizer, are taken for.
_UNNAMED = {"qwen2": _QWEN2, "qwen3": _QWEN2}


def adds_bos_by_default(name: str | None) -> bool:
    return name in _RULES and _RULES[name].adds_bos


def find_rule(name: str | None, architecture: str) -> Rule:
    """Raises `ConfigError` for a name that is not known."""
    if name in (None, "", "default"):
        return _UNNAMED.get(architecture, _GPT2)
    if name not in _RULES:
        raise ConfigError(f"tokenizer.ggml.pre is {name!r}; known: {', '.join(sorted(_RULES))}")
    return _RULES[name]


def apply_rule(rule: Rule, tokenizer: Tokenizer, adds_space_prefix: bool) -> None:
    """Give the byte-level tokenizer its normalizer and its way to cut words."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=adds_space_prefix, use_regex=rule.pattern is None)
    steps: list[pre_tokenizers.PreTokenizer] = [byte_level]
    if rule.pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated", invert=False))
    elif rule.cuts_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
