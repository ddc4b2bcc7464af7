"""What must come of a GGUF file: the answers of the equal checkpoint, or a refusal in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.checkpoint import resolve_checkpoint
from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import random_tokens, reference_logits

LENGTH = 120  # far beyond the 16 positions after which scaled ropes differ most


def assert_equal(path: Path, source: Path) -> Path:
    """The file's logits are those of transformers on the checkpoint, and its greedy continuation is the same. Returns
    the converted folder.
    """
    folder = resolve_checkpoint(str(path))
    prompt = random_tokens(LENGTH, seed=3)
    paged = PagedModel(folder, max_len=128)
    paged.start(0, LENGTH)
    logits = paged.prefill(0, prompt)
    torch.testing.assert_close(logits, reference_logits(source, prompt, []), atol=1e-4, rtol=0)
    greedy: list[int] = []
    for _ in range(4):
        greedy.append(int(logits[-1].argmax()))
        logits = paged.step([(0, greedy[-1])], [])
    assert greedy == reference_logits(source, prompt, greedy)[LENGTH - 1 : -1].argmax(-1).tolist()
    return folder


def assert_refused(path: Path, *messages: str) -> None:
    """The path is refused in one line that holds all of `messages`."""
    with pytest.raises(ConfigError) as caught:
        resolve_checkpoint(str(path))
    for message in messages:
        assert message in str(caught.value)
    assert "\n" not in str(caught.value)
