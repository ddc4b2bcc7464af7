"""Every kind of decoder that a `tokenizer.json` can have: it loads, and what streams is the decoding of the whole."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders
from tokenizers import Tokenizer as BackendTokenizer

from cb_backend.front_end.text.detokenizer import IncrementalDetokenizer
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.support.token_pieces import DecoderKind, TokenPieces
from tests.front_end.conftest import byte_fallback_backend, byte_level_backend

SPACE, FALLBACK = decoders.Replace("▁", " "), [decoders.ByteFallback(), decoders.Fuse()]
SPACES = decoders.Replace(Regex("▁+"), " ")
ONE_SPACE, MARKS, BYTE_LEVEL = (
    decoders.Replace(Regex(" +"), " "),
    decoders.Replace(Regex("Ġ"), "_"),
    decoders.ByteLevel(),
)


def byte_level_alone() -> BackendTokenizer:
    return byte_level_backend(has_extra_token=False)


KINDS: list[tuple[str, DecoderKind, Callable[[], BackendTokenizer], Any]] = [
    ("regex", DecoderKind.FALLBACK, byte_fallback_backend, decoders.Sequence([SPACES, *FALLBACK])),
    (
        "regex and strip",
        DecoderKind.FALLBACK,
        byte_fallback_backend,
        decoders.Sequence([SPACES, decoders.Replace(Regex("[H!]"), "中"), *FALLBACK, decoders.Strip(" ", 1, 0)]),
    ),
    ("nested", DecoderKind.FALLBACK, byte_fallback_backend, decoders.Sequence([decoders.Sequence([SPACE]), *FALLBACK])),
    (
        "regex over the joined text",
        DecoderKind.WHOLE,
        byte_fallback_backend,
        decoders.Sequence([SPACE, *FALLBACK, decoders.Replace(Regex(r" ([!x])"), "<>")]),
    ),
    ("byte-level, regex", DecoderKind.WHOLE, byte_level_backend, decoders.Sequence([BYTE_LEVEL, ONE_SPACE])),
    ("regex, byte-level", DecoderKind.WHOLE, byte_level_alone, decoders.Sequence([MARKS, BYTE_LEVEL])),
    ("regex alone", DecoderKind.WINDOW, byte_fallback_backend, SPACES),
    ("metaspace", DecoderKind.WINDOW, byte_fallback_backend, decoders.Metaspace()),
    ("word pieces", DecoderKind.WINDOW, byte_fallback_backend, decoders.WordPiece("##", True)),
    ("bpe", DecoderKind.WINDOW, byte_fallback_backend, decoders.BPEDecoder("</w>")),
    ("ctc", DecoderKind.WINDOW, byte_fallback_backend, decoders.CTC()),
    ("fuse", DecoderKind.WINDOW, byte_fallback_backend, decoders.Fuse()),
    ("none", DecoderKind.WINDOW, byte_fallback_backend, None),
]  # fmt: skip


def written(folder: Path, make: Callable[[], BackendTokenizer], decoder: Any) -> Path:
    state = json.loads(make().to_str())
    state["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return folder


def outputs(backend: BackendTokenizer, num_ids: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs: few and many tokens, of the whole vocabulary and of its words alone.

    Single bytes stand apart or make whole characters: how far back a broken run reaches is `test_detokenizer`'s.
    """
    draw = random.Random(5)
    words = range(num_ids - 12, num_ids)
    made = []
    for index in range(120):
        length = draw.choice([1, 3, 10, 40, 200])
        ids: list[int] = []
        while len(ids) < length:
            ids += [draw.choice(words), *([draw.randrange(num_ids)] if draw.random() < 0.3 else [])]
            ids += [draw.choice(words)] if draw.random() < 0.7 else backend.encode("é中😀").ids[2:]
        made.append((backend.encode("Hello x").ids if index % 2 else [], ids))
    return made


@pytest.mark.parametrize(("name", "kind", "make", "decoder"), KINDS, ids=[each[0] for each in KINDS])
def test_r13c_streaming_is_the_decoding_of_the_whole(
    tmp_path: Path, name: str, kind: DecoderKind, make: Callable[[], BackendTokenizer], decoder: Any
) -> None:
    tokenizer = Tokenizer(written(tmp_path, make, decoder))
    assert tokenizer.pieces.kind is kind
    backend = BackendTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    num_compared = 0
    for prompt_ids, ids in outputs(backend, tokenizer.vocab_size):
        before, whole = backend.decode(prompt_ids) if prompt_ids else "", backend.decode(prompt_ids + ids)
        if not whole.startswith(before):  # the output changes what the prompt reads like
            continue
        stream = IncrementalDetokenizer(tokenizer, prompt_ids)
        assert "".join([*(stream.push([token_id]) for token_id in ids), stream.flush()]) == whole[len(before) :], ids
        num_compared += 1
    assert num_compared > 60


def test_r13c_pieces_of_a_regex_are_the_librarys(tmp_path: Path) -> None:
    written(tmp_path, byte_fallback_backend, KINDS[1][3])
    backend = BackendTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    pieces = TokenPieces(backend)
    assert pieces.has_bytes
    shown = [pieces.as_text[backend.token_to_id(token)] for token in ("▁Hello", "▁▁", "!", "<0x41>")]
    assert shown == [" 中ello", " ", "中", 0x41]


def test_r13c_a_text_is_shown_before_its_end(tmp_path: Path) -> None:
    """Steps that read the joined text hold a few tokens back, not the answer."""
    tokenizer = Tokenizer(written(tmp_path, byte_fallback_backend, KINDS[3][3]))
    hello = tokenizer.pieces.backend.token_to_id("▁Hello")
    stream = IncrementalDetokenizer(tokenizer)
    assert "".join(stream.push([hello]) for _ in range(200)).count("Hello") >= 195
    assert stream.flush().count("Hello") <= 5
