"""Names of adapters in a client's `model`: pytest tests/gateway/test_adapter_names.py"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cb_backend.gateway.adapters import AdapterNames, Chosen
from cb_backend.gateway.errors import ApiError
from cb_backend.gateway.triton import Model
from cb_backend.support import adapter_files


def model(name: str) -> Model:
    return Model(name, frozenset({"text_input"}), frozenset({"text_output"}))


MODELS = {name: model(name) for name in ("llm", "llm_lora_doll", "plain")}


def add_model(repository: Path, name: str, arguments: dict[str, Any], listed: Any = None) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps(arguments))
    if listed is not None:
        (version / "multi_lora.json").write_text(json.dumps(listed))
    return version / "multi_lora.json"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    add_model(tmp_path, "llm", {"model": "m", "enable_lora": "true"}, {"sheep": "s", "a_lora_b": "x", "doll": "d"})
    add_model(tmp_path, "plain", {"model": "m"}, {"sheep": "s"})
    return tmp_path


def chosen(names: AdapterNames, name: str) -> tuple[str, str]:
    found: Chosen = names.choose(name, MODELS)
    return found.model.name, found.adapter


def refusal(names: AdapterNames, name: str) -> str:
    with pytest.raises(ApiError) as raised:
        names.choose(name, MODELS)
    assert raised.value.status == 404
    return str(raised.value)


def test_a_name_is_a_model_or_a_model_and_an_adapter(repository: Path) -> None:
    names = AdapterNames("_lora_", str(repository))
    assert chosen(names, "llm") == ("llm", "")
    assert chosen(names, "llm_lora_sheep") == ("llm", "sheep")
    assert chosen(names, "llm_lora_a_lora_b") == ("llm", "a_lora_b")
    assert chosen(names, "llm_lora_doll") == ("llm_lora_doll", ""), "a model of the server's comes first"


@pytest.mark.parametrize("name", ["llm_lora_wolf", "llm_lora_", "_lora_sheep", "plain_lora_sheep", "other", ""])
def test_what_is_neither_is_404_with_what_there_is(repository: Path, name: str) -> None:
    text = refusal(AdapterNames("_lora_", str(repository)), name)
    assert f"the model {name!r} does not exist here" in text
    assert "llm, llm_lora_sheep, llm_lora_a_lora_b, llm_lora_doll" in text


def test_every_adapter_of_a_list_is_a_model(repository: Path) -> None:
    one = {"llm": model("llm"), "plain": model("plain")}
    assert AdapterNames("-", str(repository)).names(one) == [
        "llm", "llm-sheep", "llm-a_lora_b", "llm-doll", "plain"
    ]  # fmt: skip


def test_no_separator_means_no_adapters(repository: Path) -> None:
    names = AdapterNames("", str(repository))
    assert names.names(MODELS) == ["llm", "llm_lora_doll", "plain"]
    assert "does not exist" in refusal(names, "llm_lora_sheep")


def test_without_a_repository_the_server_decides() -> None:
    names = AdapterNames("_lora_", None)
    assert names.names(MODELS) == ["llm", "llm_lora_doll", "plain"]
    assert chosen(names, "plain_lora_any") == ("plain", "any")


def test_a_changed_list_counts_and_a_half_written_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "changed_ns", lambda status: status.st_mtime_ns)
    listed = add_model(tmp_path, "llm", {"model": "m", "enable_lora": True}, {"doll": "d"})
    names = AdapterNames("_lora_", str(tmp_path))
    models = {"llm": model("llm")}
    for text, expected in (
        ('{"doll": "d"}', ["doll"]), ('{"doll": "d", "sheep": "s"}', ["doll", "sheep"]), ('{"doll"', ["doll", "sheep"]),
        ("{}", []),
    ):  # fmt: skip
        listed.write_text(text)
        assert names.names(models) == ["llm", *(f"llm_lora_{name}" for name in expected)]
    then = time.time() - 60
    listed.write_text('{"kept": "k"}')
    os.utime(listed, (then, then))
    assert names.names(models) == ["llm", "llm_lora_kept"]
    listed.unlink()
    assert names.names(models) == ["llm", "llm_lora_kept"], "as the server has it"


def test_a_model_of_an_engine_has_that_engines_adapters(repository: Path) -> None:
    add_model(repository, "front", {"engine_of": "llm"})
    assert AdapterNames("_lora_", str(repository)).names({"front": model("front")})[1:] == [
        "front_lora_sheep", "front_lora_a_lora_b", "front_lora_doll"
    ]  # fmt: skip


def test_a_model_that_is_an_adapter_has_no_adapters(repository: Path) -> None:
    """Its engine's list is not its own: the server refuses every other name."""
    add_model(repository, "own", {"engine_of": "llm", "lora": "files"})
    names, models = AdapterNames("_lora_", str(repository)), {"llm": model("llm"), "own": model("own")}
    assert [name for name in names.names(models) if name.startswith("own")] == ["own"]
    assert names.choose("own", models) == Chosen(models["own"])
    with pytest.raises(ApiError, match="own_lora_sheep"):
        names.choose("own_lora_sheep", models)
