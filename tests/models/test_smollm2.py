"""The demo's real checkpoint, where it has been fetched: the text a known-good implementation produces."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from cb_backend.cli.demo_model import demo_model_dir
from tests.models.paged_model import PagedModel

# Greedy, float32, by transformers.
EXPECTED = [7042, 30, 198, 198, 504, 2988, 314, 42]


@pytest.mark.skipif(
    not demo_model_dir().is_dir(), reason="the demo model is not in the cache; `cb-backend demo` gets it"
)
@pytest.mark.parametrize("chunk", [2, 5])
def test_greedy_tokens(chunk: int) -> None:
    folder = demo_model_dir()
    prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("The capital of France is").ids
    paged = PagedModel(folder, max_len=32)
    paged.start(0, len(prompt))
    tokens = [int(paged.prefill(0, prompt, chunk)[-1].argmax())]
    while len(tokens) < len(EXPECTED):
        tokens.append(int(paged.step([(0, tokens[-1])], [])[0].argmax()))
    assert tokens == EXPECTED
