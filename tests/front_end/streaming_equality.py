"""Streamed text against the library's decoding of all ids at once, on random multilingual prompts and outputs.

    python -m tests.front_end.streaming_equality --pairs 2000 --seed 1

An output is pushed in pieces of random lengths, as steps and coalesced responses bring it. Its deltas joined must be
what the library makes of all its ids, and no delta may hold a U+FFFD that is not in there.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from typing import NamedTuple

from tokenizers import Tokenizer as BackendTokenizer

from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.request_params import RequestParams
from cb_backend.front_end.text.detokenizer import MAX_HELD_RUN_BYTES, REPLACEMENT
from cb_backend.front_end.text.output_text import OutputText
from cb_backend.front_end.text.tokenizer import Tokenizer
from tests.front_end.real_tokenizers import NAMES, tokenizer_folder

PHRASES = [
    "The quick brown fox", "def add(a, b):\n    return a + b\n", "  two  spaces\t\ttabs\r\n", "naïve café, Grüße",
    "東京は夜の七時", "中文字符，标点。", "한국어 문장입니다", "Привет, мир", "Ελληνικά", "שלום עולם", "مرحبا بالعالم",
    "नमस्ते दुनिया", "ไทยไม่มีช่องว่าง", "བོད་སྐད་", "ᚠᚢᚦᚨᚱᚲ", "𒀀𒁀𒂀", "😀🙃🚀", "👩\u200d👩\u200d👧\u200d👦", "👍🏽", "🇯🇵🇩🇪",
    "🏴\U000e0067\U000e007f", "e\u0301a\u0308o\u0302\u0323", "Z\u0335\u0321\u0353a\u0334l\u0337g\u0338o\u0336",
    "\u202eright to left\u202c", "x\u200dy\u200c", "ﬁ ﬂ ½ ℵ", "\ufffd", "\u0000", "𝒜𝓁𝓅𝒽𝒶", "１２３", "…—“”",
    "\U0010ffff", "\ufeff",
]  # fmt: skip


class Pair(NamedTuple):
    """Token ids of a prompt that is clean text, and of an output that may be anything."""

    prompt: list[int]
    output: list[int]
    pieces: list[int]  # lengths in which the output is pushed


def make_pair(backend: BackendTokenizer, vocab_size: int, seed: int) -> Pair:
    draw = random.Random(seed)
    prompt = backend.encode(_text(draw) + " and").ids  # a run of bytes at its end would go on in the output
    output = backend.encode(_text(draw), add_special_tokens=False).ids
    kind = draw.random()
    for _ in range(draw.randint(1, 6) if kind > 0.4 else 0):  # a model that stumbles: characters break
        at = draw.randrange(len(output) + 1)
        output[at : at + draw.randint(0, 2)] = [draw.randrange(vocab_size) for _ in range(draw.randint(0, 2))]
    if kind > 0.9:
        output = [draw.randrange(vocab_size) for _ in range(draw.randint(1, 60))]
    output = output[: draw.randint(1, max(len(output), 1))]  # cut off anywhere
    pieces = []
    while sum(pieces) < len(output):
        pieces.append(draw.choice([1, 1, 1, 2, 3, 7]))
    return Pair(prompt, output, pieces)


def _text(draw: random.Random) -> str:
    parts = draw.choices(PHRASES, k=draw.randint(1, 8))
    return draw.choice([" ", "", "\n"]).join(parts)


def full_decode(backend: BackendTokenizer, pair: Pair) -> str:
    """What the output adds to the prompt, decoded at once."""
    before = backend.decode(pair.prompt, skip_special_tokens=True)
    after = backend.decode(pair.prompt + pair.output, skip_special_tokens=True)
    assert after.startswith(before), "the prompt is clean text, so nothing behind it changes it"
    return str(after[len(before) :])


def check(tokenizer: Tokenizer, backend: BackendTokenizer, pair: Pair) -> str:
    """Compare one pair; returns what it was: `equal`, or `long run` where the documented exception was met."""
    expected = full_decode(backend, pair)
    text = OutputText(tokenizer, RequestParams(), pair.prompt)
    deltas, at = [], 0
    for length in pair.pieces:
        deltas.append(text.push(pair.output[at : at + length]).text)
        at += length
    deltas.append(text.push([], FinishReason.LENGTH).text)
    streamed = "".join(deltas)
    assert streamed.count(REPLACEMENT) <= expected.count(REPLACEMENT), f"a broken character more: {pair}"
    for delta in deltas:
        delta.encode()  # no half of a pair of surrogates
    if streamed == expected:
        return "equal"
    # A run of bytes too long to hold back that turns out broken: the library replaces its good characters too.
    assert REPLACEMENT * MAX_HELD_RUN_BYTES in expected, f"{streamed!r} is not {expected!r}: {pair}"
    return "long run"


def run(name: str, num_pairs: int, seed: int) -> Counter[str]:
    """Check pairs of one tokenizer. Raises `AssertionError` with the pair that differs."""
    folder = tokenizer_folder(name)
    tokenizer = Tokenizer(folder)
    backend = BackendTokenizer.from_file(str(folder / "tokenizer.json"))
    counts: Counter[str] = Counter()
    for index in range(num_pairs):
        pair = make_pair(backend, tokenizer.vocab_size, seed * 1_000_003 + index)
        counts[check(tokenizer, backend, pair)] += 1
        counts["tokens"] += len(pair.output)
        counts["broken outputs"] += REPLACEMENT in full_decode(backend, pair)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2000, help="prompts and outputs for each tokenizer")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for name in NAMES:
        began = time.monotonic()
        counts = run(name, arguments.pairs, arguments.seed)
        figures = ", ".join(f"{key} {counts[key]:,}" for key in ("equal", "long run", "broken outputs", "tokens"))
        print(f"{name}: {figures} ({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
