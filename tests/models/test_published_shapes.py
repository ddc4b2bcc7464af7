"""Every published shape of a checkpoint comes out as its table says; a table that is wrong is found out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.models.published_checkpoints import published_checkpoints
from tests.models.published_shape import PublishedShape
from tests.models.published_shapes import difference, main
from tests.models.tiny_checkpoints import write_checkpoint

SHAPES = list(published_checkpoints())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_published_shape(shape: PublishedShape, tmp_path: Path) -> None:
    assert difference(shape, tmp_path) is None


def test_the_shapes_have_names_of_their_own() -> None:
    names = [shape.name for shape in SHAPES]
    assert len(names) == len(set(names)) >= 60


def wrong_reference(folder: Path) -> Path:
    return write_checkpoint("llama-mha", folder)


@pytest.mark.parametrize(
    ("outcome", "checkpoint", "found"),
    [
        ("equal", "llama-gqa", "logits differ by"),
        ("a reason", "llama-gqa", "served, though it is to be refused"),
        ("a reason", None, "refused for another reason: .* holds no config.json"),
        ("equal", None, "refused: .* holds no config.json"),
    ],
)
def test_a_difference_is_told(outcome: str, checkpoint: str | None, found: str, tmp_path: Path) -> None:
    def build(folder: Path) -> Path:
        return folder if checkpoint is None else write_checkpoint(checkpoint, folder)

    wrong = difference(PublishedShape("wrong", build, outcome, wrong_reference), tmp_path)
    assert wrong is not None
    assert re.match(found, wrong)


def test_the_command_prints_a_table_and_its_count(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CB_BACKEND_CACHE", "")  # the command sets its own
    assert main(["--only", "Git LFS pointer as"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    files: Git LFS pointer as weights")
    assert lines[-1].startswith("3 shapes, 0 come out otherwise")
    assert main(["--only", "no such shape"]) == 1
