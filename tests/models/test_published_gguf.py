"""Every published shape of a GGUF file ends as its table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.gguf_checks import assert_equal, assert_refused
from tests.models.published_gguf import published_gguf
from tests.models.published_shape import PublishedShape

pytestmark = pytest.mark.usefixtures("cache")

SHAPES = list(published_gguf())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_published_shape(shape: PublishedShape, tmp_path: Path) -> None:
    for name in ("built", "reference"):
        (tmp_path / name).mkdir()
    path = shape.build(tmp_path / "built")
    if shape.outcome == "equal":
        assert shape.reference is not None  # transformers is to load safetensors, not the file
        assert_equal(path, shape.reference(tmp_path / "reference"))
    else:
        assert_refused(path, shape.outcome)


def test_the_shapes_have_names_of_their_own() -> None:
    names = [shape.name for shape in SHAPES]
    assert len(names) == len(set(names)) >= 15
