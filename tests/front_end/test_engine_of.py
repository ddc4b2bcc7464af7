"""A model that is another front of a neighbour's engine: pytest tests/front_end/test_engine_of.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.contracts.errors import ConfigError
from cb_backend.support.version_folder import engine_folder


def make(repository: Path, name: str, version: str, text: str) -> Path:
    folder = repository / name / version
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(text)
    return folder


def test_the_newest_version_of_the_neighbour(tmp_path: Path) -> None:
    make(tmp_path, "llm", "9", '{"model": "a"}')
    newest = make(tmp_path, "llm", "10", '{"model": "b"}')
    front = make(tmp_path, "front", "1", '{"engine_of": "llm"}')
    assert engine_folder(front) == newest
    assert engine_folder(newest) == newest
    assert engine_folder(tmp_path / "gone" / "1") == tmp_path / "gone" / "1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"engine_of": "nobody"}', "'nobody', which is no model with an engine"),
        ('{"engine_of": "front"}', "no model with an engine"),
        ('{"engine_of": "other"}', "no model with an engine"),
        ('{"engine_of": "../llm"}', "name a model of the same repository"),
        ('{"engine_of": 1}', "name a model of the same repository"),
        ('{"engine_of": "llm", "max_num_seqs": 4}', "remove the others"),
    ],
)
def test_bad_references(tmp_path: Path, text: str, message: str) -> None:
    make(tmp_path, "llm", "1", '{"model": "a"}')
    make(tmp_path, "other", "1", '{"engine_of": "llm"}')
    front = make(tmp_path, "front", "1", text)
    with pytest.raises(ConfigError, match=message):
        engine_folder(front)
