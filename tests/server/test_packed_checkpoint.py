"""Checkpoints of four bits through a real server: the text is that of transformers on the numbers they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.cli.demo_model import ensure_demo_model
from tests.models.rounded_checkpoint import write_rounded
from tests.server.conftest import running_server
from tests.server.tiny_checkpoint import Reference, write_tiny_checkpoint

pytestmark = pytest.mark.server


def assert_served(source: Path, folder: Path, group: int, prompts: list[str], num_tokens: int) -> None:
    """The quantised checkpoint is smaller than its numbers, and answers what they answer."""
    plain = folder / "plain"
    quantised = write_rounded(source, folder / "w4a16", group=group, plain=plain)
    sizes = [(path / "model.safetensors").stat().st_size for path in (quantised, plain)]
    assert sizes[0] < sizes[1]
    reference = Reference(plain)
    with running_server(quantised, folder / "models", front_ends=1, max_model_len=256) as server:
        for prompt in prompts:
            found = server.client.generate(prompt, max_tokens=num_tokens, temperature=0)
            assert found == reference.greedy_text(prompt, num_tokens)
        server.wait_idle()


def test_a_small_checkpoint_of_four_bits(tmp_path: Path) -> None:
    assert_served(write_tiny_checkpoint(tmp_path / "tiny"), tmp_path, 32, ["the quick", "seven wizards", "1 + 1"], 24)


@pytest.mark.long
@pytest.mark.slow
def test_smollm2_of_four_bits(tmp_path: Path) -> None:
    prompts = ["The capital of France is", "Once upon a time, a fox and a crow"]
    assert_served(ensure_demo_model(print), tmp_path, 64, prompts, 16)
