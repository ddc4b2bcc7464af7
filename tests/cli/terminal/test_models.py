"""`cb-backend models` over a hub cache and a cache of ours that the tests make themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from cb_backend.cli import models as command
from cb_backend.cli.main import main
from cb_backend.cli.terminal import cached_models
from cb_backend.engine.rest_desk import KeptWeights
from cb_backend.front_end.engines.runtime_dir import EngineLife

ONE, TWO = "a" * 40, "b" * 40


def write_hub_model(hub: Path, name: str, revisions: dict[str, dict[str, bytes]]) -> Path:
    """As huggingface_hub lays it out: blobs once, a folder of links for each revision, refs to the last."""
    repo = hub / f"models--{name.replace('/', '--')}"
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs").mkdir()
    for commit, files in revisions.items():
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file, content in files.items():
            blob = repo / "blobs" / f"{hash(content):x}".strip("-")
            blob.write_bytes(content)
            (snapshot / file).symlink_to(blob)
        (repo / "refs" / "main").write_text(commit)
    return repo


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The hub's folder and ours, each with a model or two; one of the hub's is another's copy, revision and all."""
    hub, own = tmp_path / "hub", tmp_path / "own"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("CB_BACKEND_CACHE", str(own))
    monkeypatch.setattr(command, "running_engines", lambda: [])
    write_hub_model(hub, "org/small", {ONE: {"config.json": b"x" * 1500}, TWO: {"config.json": b"y" * 2500}})
    write_hub_model(hub, "org/other", {ONE: {"config.json": b"z" * 10}})
    (hub / "datasets--org--data" / "snapshots").mkdir(parents=True)
    for name, size in (("Org--Demo-1B", 3000), ("gguf-0123", 70), (".gguf-0456-half", 9)):
        (own / "models" / name).mkdir(parents=True)
        (own / "models" / name / "model.safetensors").write_bytes(b"w" * size)
    return hub, own


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    capsys.readouterr()
    assert main(["models", "list", "--json"]) == 0
    return {model["name"]: model["num_bytes"] for model in json.loads(capsys.readouterr().out)}


def test_h16_models_lists_both_caches_with_sizes(caches: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    converted = str(caches[1] / "models" / "gguf-0123")
    assert listed(capsys) == {"Org/Demo-1B": 3000, "org/small": 4000, "org/other": 10, converted: 70}
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["MODEL", "SIZE", "USED", "IN"]
    small = next(line for line in lines if line.startswith("org/small"))
    assert "4.0 kB" in small
    assert small.endswith("hub")
    assert lines[-1] == "4 checkpoints, 7.1 kB"


def test_h16_models_of_an_empty_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "nowhere"))
    monkeypatch.setenv("CB_BACKEND_CACHE", str(tmp_path / "neither"))
    assert main(["models", "list"]) == 0
    assert "cb-backend models fetch ID" in capsys.readouterr().out


def test_h16_models_removes_every_revision_and_nothing_else(
    caches: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    hub, own = caches
    assert main(["models", "remove", "--yes", "org/small", "Org/Demo-1B"]) == 0
    assert "removed org/small, 4.0 kB are free again" in capsys.readouterr().out
    assert not (hub / "models--org--small").exists()
    assert not (own / "models" / "Org--Demo-1B").exists()
    assert set(listed(capsys)) == {"org/other", str(own / "models" / "gguf-0123")}


def test_h16_models_removes_a_download_that_never_ended(
    caches: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    repo = caches[0] / "models--org--half"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots").mkdir()
    (repo / "refs").mkdir()
    (repo / "blobs" / "part.incomplete").write_bytes(b"p" * 5000)
    assert "org/half" in listed(capsys)
    assert main(["models", "remove", "-y", "org/half"]) == 0
    assert not repo.exists()


@pytest.mark.parametrize(("words", "text"), [
    (["org/smal"], "'org/smal' is not in the cache; there is: "),
    (["org/small", "org/no"], "'org/no' is not in the cache"),
    (["org/small"], "nobody can be asked here; --yes removes without a question"),
])  # fmt: skip
def test_h16_models_removes_nothing_by_mistake(
    caches: tuple[Path, Path], words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "remove", *words]) == 1
    assert text in capsys.readouterr().err
    assert listed(capsys)["org/small"] == 4000


def test_h16_models_asks_before_it_removes(
    caches: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    assert main(["models", "remove", "org/small"]) == 1
    assert "nothing was removed" in capsys.readouterr().out
    monkeypatch.setattr("builtins.input", lambda prompt: "Y")
    assert main(["models", "remove", "org/small"]) == 0
    assert "org/small" not in listed(capsys)


def test_h16_models_leaves_what_is_being_served(
    caches: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "running_engines", lambda: [EngineLife(4711, 1, "/nowhere/a.sock")])
    monkeypatch.setattr(command, "model_of", lambda life: "org/small")
    assert main(["models", "remove", "--yes", "org/small"]) == 1
    assert "org/small is being served by engine 4711; stop that server first" in capsys.readouterr().err
    assert listed(capsys)["org/small"] == 4000


def test_h16_models_leaves_a_snapshot_that_is_being_served(
    caches: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its folder, as a server without a network is given it."""
    served = [str(caches[0] / "models--org--small" / "snapshots" / TWO), "", "org/none"]
    monkeypatch.setattr(command, "running_engines", lambda: [EngineLife(pid, 1, "/nowhere/a") for pid in range(1, 4)])
    monkeypatch.setattr(command, "model_of", lambda life: served[life.pid - 1])
    assert main(["models", "remove", "--yes", "org/small"]) == 1
    assert "org/small is being served by engine 1" in capsys.readouterr().err
    assert main(["models", "remove", "--yes", "org/other"]) == 0


def test_h16_models_leaves_what_an_update_has_brought(
    caches: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine reads it again after a sleep, or in the place of one that died."""
    KeptWeights(tmp_path).keep(str(caches[0] / "models--org--small" / "snapshots" / TWO))
    monkeypatch.setattr(command, "running_engines", lambda: [EngineLife(7, 1, str(tmp_path / "a"))])
    monkeypatch.setattr(command, "model_of", lambda life: "org/none")
    assert main(["models", "remove", "--yes", "org/small"]) == 1
    assert "org/small is being served by engine 7" in capsys.readouterr().err
    assert main(["models", "remove", "--yes", "org/other"]) == 0


def test_h16_models_a_name_given_twice_is_removed_once(
    caches: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "remove", "--yes", "Org/Demo-1B", "Org/Demo-1B"]) == 0
    assert capsys.readouterr().out.count("removed Org/Demo-1B") == 1


def test_h16_models_fetches_as_a_server_does(
    caches: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By huggingface_hub's own function, without the formats that nobody reads; what is there is not fetched."""
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, ignore_patterns))
        return str(caches[0] / "models--org--new")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert main(["models", "fetch", "org/new", "Org/Demo-1B"]) == 0
    assert [name for name, _ in asked] == ["org/new"]
    assert "onnx/*" in asked[0][1]
    said = capsys.readouterr().out
    assert "serve it: cb-backend serve org/new" in said
    assert str(caches[1] / "models" / "Org--Demo-1B") in said
    assert main(["models", "fetch", "../etc"]) == 1
    assert "'../etc' is no hub id like org/name" in capsys.readouterr().err


def test_the_demos_model_is_fetched_in_its_own_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cached_models, "ensure_demo_model", lambda say: tmp_path / "demo")
    assert cached_models.fetch(cached_models.DEMO_MODEL, print) == tmp_path / "demo"
