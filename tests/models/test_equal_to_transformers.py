"""Every family and option computes what transformers computes, however the tokens are cut into steps."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import CONFIGS, random_tokens, reference_logits, write_checkpoint
from tests.models.tiny_options import ORIGINAL_LEN

TOLERANCE = 1e-4
# Within the pretraining context and across a block border; across its end while decoding; 8 times its length.
LENGTHS = (9, ORIGINAL_LEN - 2, 8 * ORIGINAL_LEN - 8)
NUM_DECODE = 6


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@cache
def expected(folder: Path, length: int) -> tuple[list[int], list[int], Tensor]:
    """(prompt, further tokens, logits of all of them by transformers)."""
    tokens = random_tokens(length + NUM_DECODE, seed=length)
    prompt, decode = tokens[:length], tokens[length:]
    return prompt, decode, reference_logits(folder, prompt, decode)


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("length", LENGTHS)
def test_one_shot_prefill_and_decode(checkpoint: Path, length: int) -> None:
    prompt, decode, logits = expected(checkpoint, length)
    paged = PagedModel(checkpoint)
    paged.start(0, len(prompt))
    ours = [paged.prefill(0, prompt)] + [paged.step([(0, token)], []) for token in decode]
    assert difference(torch.cat(ours), logits) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, 8, 24])
def test_chunked_prefill(checkpoint: Path, chunk: int) -> None:
    prompt, decode, logits = expected(checkpoint, LENGTHS[1] if chunk == 1 else LENGTHS[2])
    paged = PagedModel(checkpoint)
    paged.start(1, len(prompt))
    ours = [paged.prefill(1, prompt, chunk)] + [paged.step([(1, token)], []) for token in decode]
    assert difference(torch.cat(ours), logits) < TOLERANCE


def test_neighbours_of_other_lengths_in_one_step(checkpoint: Path) -> None:
    """Slot 0 decodes while the long prompt of slot 2 arrives in chunks and slot 1 starts: nobody notices."""
    short, short_decode, short_logits = expected(checkpoint, LENGTHS[1])
    long, long_decode, long_logits = expected(checkpoint, LENGTHS[2])
    other, other_decode, other_logits = expected(checkpoint, LENGTHS[0])
    paged = PagedModel(checkpoint)
    for slot, prompt in enumerate((short, other, long)):
        paged.start(slot, len(prompt))
    paged.step([], [(0, short), (2, long[:50])])
    mixed = paged.step([(0, short_decode[0])], [(2, long[50:100]), (1, other)])
    assert difference(mixed[:1], short_logits[len(short) : len(short) + 1]) < TOLERANCE
    assert difference(mixed[1:51], long_logits[50:100]) < TOLERANCE
    assert difference(mixed[51:], other_logits[: len(other)]) < TOLERANCE
    mixed = paged.step([(1, other_decode[0]), (0, short_decode[1])], [(2, long[100:])])
    assert difference(mixed[0], other_logits[len(other)]) < TOLERANCE
    assert difference(mixed[1], short_logits[len(short) + 1]) < TOLERANCE
    assert difference(mixed[2:], long_logits[100 : len(long)]) < TOLERANCE
    mixed = paged.step([(2, long_decode[0]), (1, other_decode[1]), (0, short_decode[2])], [])
    theirs = torch.stack((long_logits[len(long)], other_logits[len(other) + 1], short_logits[len(short) + 2]))
    assert difference(mixed, theirs) < TOLERANCE
