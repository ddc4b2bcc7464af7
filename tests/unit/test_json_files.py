"""JSON files that people write: pytest tests/engine/test_json_files.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.errors import ConfigError
from cb_backend.support.version_folder import engine_folder, load_engine_config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": "a", "seed": 1, "model": "b"}', "model.json sets 'model' more than once; keep one"),
        ("[" * 100_000, "model.json is not valid JSON: nested too deeply"),
        ('{"model": "a", "seed": ' + "9" * 5000 + "}", "model.json is not valid JSON"),
        ('{"model": null}', "model.json does not set 'model'"),
        ('{"model": "a", "max_num_seqs": null}', "'max_num_seqs' is null; remove it to get the default"),
        ('{"model": "a", "tokenizer": ""}', "tokenizer is empty; remove it to get the default"),
        ('{"model": "a", "engine_python": ""}', "engine_python is empty; remove it to get the default"),
    ],
)
def test_a_model_json_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_engine_config(tmp_path / "model.json")


def test_a_file_that_is_not_text_or_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.json"
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match=r"model\.json is not text in UTF-8 .byte 0xff at 0."):
        load_engine_config(file)

    def refuse(self: Path, encoding: str | None = None) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"model\.json cannot be read \(Permission denied: .*model\.json\)"):
        load_engine_config(file)


def test_engine_of_beside_itself_is_no_other_models_engine(tmp_path: Path) -> None:
    version = tmp_path / "front" / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text('{"engine_of": "a", "engine_of": "b"}')
    assert engine_folder(version) == version
    with pytest.raises(ConfigError, match="'engine_of' more than once"):
        load_engine_config(version / "model.json")


def test_an_error_repeats_no_more_of_a_value_than_helps() -> None:
    with pytest.raises(ConfigError) as caught:
        engine_config_from_dict({"model": "a", "max_num_seqs": "9" * 5000})
    assert "'max_num_seqs' must be of type int, got '999" in str(caught.value)
    assert len(str(caught.value)) < 200
