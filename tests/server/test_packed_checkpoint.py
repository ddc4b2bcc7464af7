"""Checkpoints of four bits through a real server: the text is that of transformers on the numbers they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cb_backend.cli.demo_model import ensure_demo_model
from tests.models.rounded_checkpoint import write_rounded
from tests.server.conftest import running_server
from tests.server.tiny_checkpoint import Reference, write_tiny_checkpoint

pytestmark = pytest.mark.server


def assert_served(source: Path, folder: Path, group: int, prompts: list[str], num_tokens: int) -> list[str]:
    """The quantised checkpoint is smaller than its numbers, and answers what they answer. Returns the answers."""
    plain = folder / "plain"
    quantised = write_rounded(source, folder / "w4a16", group=group, plain=plain)
    sizes = [(path / "model.safetensors").stat().st_size for path in (quantised, plain)]
    assert sizes[0] < sizes[1]
    reference = Reference(plain)
    found = answers(quantised, folder / "models", prompts, num_tokens)
    assert found == [reference.greedy_text(prompt, num_tokens) for prompt in prompts]
    return found


def answers(checkpoint: Path, models: Path, prompts: list[str], num_tokens: int) -> list[str]:
    """Of a server of its own."""
    with running_server(checkpoint, models, front_ends=1, max_model_len=256) as server:
        found = [server.client.generate(prompt, max_tokens=num_tokens, temperature=0) for prompt in prompts]
        server.wait_idle()
    return found


def test_a_small_checkpoint_of_four_bits(tmp_path: Path) -> None:
    assert_served(write_tiny_checkpoint(tmp_path / "tiny"), tmp_path, 32, ["the quick", "seven wizards", "1 + 1"], 24)


@pytest.mark.long
@pytest.mark.slow
def test_smollm2_of_four_bits(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """What rounding costs is told beside it: how many greedy tokens are those of the checkpoint of 16 bits."""
    prompts = ["The capital of France is", "Once upon a time, a fox and a crow"]
    source = ensure_demo_model(print)
    found = assert_served(source, tmp_path, 64, prompts, 16)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    equal = total = 0
    for text, wanted in zip(found, answers(source, tmp_path / "plain_models", prompts, 16), strict=True):
        places = list(zip(*(tokenizer.encode(each).ids for each in (text, wanted)), strict=False))
        equal, total = equal + sum(one == other for one, other in places), total + len(places)
    print(f"{equal} of {total} greedy tokens are those of 16 bits, place by place")
    record_property("share_of_equal_tokens", equal / max(1, total))
    assert equal, "not one: the numbers are no rounding of the model's"
