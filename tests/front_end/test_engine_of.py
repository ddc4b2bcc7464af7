"""A model that is another front of a neighbour's engine: pytest tests/front_end/test_engine_of.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.contracts.errors import ConfigError
from cb_backend.support.version_folder import engine_folder, own_adapter


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
        ('{"engine_of": "llm", "lora": "x", "max_num_seqs": 4}', "remove the others"),
        ('{"lora": "x"}', "set 'engine_of' beside it"),
    ],
)
def test_bad_references(tmp_path: Path, text: str, message: str) -> None:
    make(tmp_path, "llm", "1", '{"model": "a"}')
    make(tmp_path, "other", "1", '{"engine_of": "llm"}')
    front = make(tmp_path, "front", "1", text)
    with pytest.raises(ConfigError, match=message):
        engine_folder(front)


def test_a_model_that_is_an_adapter(tmp_path: Path) -> None:
    llm = make(tmp_path, "llm", "1", '{"model": "a", "enable_lora": true}')
    sheep = make(tmp_path, "sheep", "1", '{"engine_of": "llm", "lora": "files"}')
    wolf = make(tmp_path, "wolf", "1", '{"engine_of": "llm", "lora": "/elsewhere/wolf"}')
    front = make(tmp_path, "front", "1", '{"engine_of": "llm"}')
    assert [engine_folder(version) for version in (sheep, wolf, front)] == [llm] * 3
    assert [own_adapter(version) for version in (sheep, wolf, front, llm, tmp_path)] == [
        sheep / "files", Path("/elsewhere/wolf"), None, None, None
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["7", '""', "null", '["x"]'])
def test_an_adapter_that_is_no_folder(tmp_path: Path, value: str) -> None:
    make(tmp_path, "llm", "1", '{"model": "a"}')
    sheep = make(tmp_path, "sheep", "1", f'{{"engine_of": "llm", "lora": {value}}}')
    with pytest.raises(ConfigError, match=r"model.json gives .* for 'lora'; give the adapter's folder"):
        own_adapter(sheep)
