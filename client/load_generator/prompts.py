"""Prompt text of a wanted length in tokens, the same for the same seed, with shared prefixes where ids are shared.

The wire takes text, so lengths are reached through words: common short words are one token each in nearly every
vocabulary, and a `Vocabulary` says how many tokens a word is on average, learnt from the server or from a tokenizer
file. Nothing here talks to the server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from cb_backend.traffic.traces import MOONCAKE_BLOCK_TOKENS
from cb_backend.traffic.workload import PlannedRequest

_WORDS = """
the of and to in is that it was for on are as with they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them
these so some her would make like him into time has look two more write go see number no way could people my than
first water been call who oil its now find long down day did get come made may part over new sound take only
little work know place year live me back give most very after thing our just name good man think say great where
help through much before line right too mean old any same tell boy follow came want show also around form three
small set put end does another well large must big even such because turn here why ask went men read need land
home us move try kind hand picture again change off play air away animal house point page letter mother answer
found study still learn should world
"""
WORDS = tuple(_WORDS.split())
MIN_SINGLE_TOKEN_WORDS = 32  # fewer different words would make prompts too alike
_PREFIX, _UNIQUE = 1, 2  # keep the random streams of shared and unique text apart


@dataclass(frozen=True)
class Vocabulary:
    """Words to build prompts of, and what they cost in tokens."""

    words: tuple[str, ...] = WORDS
    tokens_per_word: float = 1.0
    num_extra_tokens: float = 0.0  # special tokens the server adds to every prompt
    source: str = "assumed"  # "server", "tokenizer", "given" or "assumed": how the two figures came about

    def num_words(self, num_tokens: int) -> int:
        """Words in a prompt of about `num_tokens` tokens; at least one, since an empty prompt is refused."""
        return max(1, round((num_tokens - self.num_extra_tokens) / self.tokens_per_word))


def calibrate(count_tokens: Callable[[str], int], source: str, seed: int = 0) -> Vocabulary:
    """A vocabulary from the token counts of two texts: their difference is the words' cost, the rest is constant."""
    rng = np.random.default_rng([seed, 0])
    short, long = 40, 440
    texts = [random_text(WORDS, rng, length) for length in (short, long)]
    num_short, num_long = count_tokens(texts[0]), count_tokens(texts[1])
    tokens_per_word = (num_long - num_short) / (long - short)
    if tokens_per_word <= 0:
        raise ValueError(f"{long} words were counted as {num_long} tokens and {short} words as {num_short}")
    return Vocabulary(WORDS, tokens_per_word, max(0.0, num_short - short * tokens_per_word), source)


def vocabulary_of_tokenizer(path: str) -> Vocabulary:
    """Exact lengths: only words that are one token each in the `tokenizer.json` at `path` are used.

    Falls back to the average where the tokenizer has too few of them. Raises what `tokenizers` raises on a bad file.
    """
    from tokenizers import Tokenizer  # only here: the load test runs without it

    tokenizer = Tokenizer.from_file(path)

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    num_extra = count_tokens("")
    words = tuple(
        word
        for word in WORDS
        if count_tokens(word) == num_extra + 1 and count_tokens(f"{word} {word}") == num_extra + 2
    )
    if len(words) < MIN_SINGLE_TOKEN_WORDS:
        return calibrate(count_tokens, "tokenizer")
    return Vocabulary(words, 1.0, float(num_extra), "tokenizer")


def random_text(words: tuple[str, ...], rng: np.random.Generator, count: int) -> str:
    """`count` words drawn with `rng`, parted by blanks."""
    return " ".join([words[index] for index in rng.integers(0, len(words), count).tolist()])


@dataclass(frozen=True)
class PromptBuilder:
    """Text of planned requests. The same seed gives the same text in every process."""

    vocabulary: Vocabulary
    seed: int
    prefix_block_tokens: int = MOONCAKE_BLOCK_TOKENS
    _prefix_block: Callable[[int], list[str]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # A block is cached as words, so that a prompt can end inside one.
        object.__setattr__(self, "_prefix_block", lru_cache(maxsize=1024)(self._make_prefix_block))

    def build(self, request: PlannedRequest) -> str:
        """The prompt: the blocks of its prefix ids, then words of its own, cut to the wanted length."""
        num_words = self.vocabulary.num_words(request.num_prompt_tokens)
        words: list[str] = []
        for prefix_id in request.prefix_ids:
            if len(words) >= num_words:
                break
            words += self._prefix_block(prefix_id)
        del words[num_words:]
        if len(words) < num_words:
            rng = np.random.default_rng([self.seed, _UNIQUE, request.request_id])
            words.append(random_text(self.vocabulary.words, rng, num_words - len(words)))
        return " ".join(words)

    def _make_prefix_block(self, prefix_id: int) -> list[str]:
        rng = np.random.default_rng([self.seed, _PREFIX, prefix_id])
        num_words = max(1, round(self.prefix_block_tokens / self.vocabulary.tokens_per_word))
        return random_text(self.vocabulary.words, rng, num_words).split(" ")
