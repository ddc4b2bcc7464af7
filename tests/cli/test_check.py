"""`cb-backend check`: everything that is wrong at once, and the command itself. Cards: `test_check_room`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cb_backend.cli import check_cards
from cb_backend.cli.check_cards import CARDS
from cb_backend.cli.check_findings import Findings, examine
from cb_backend.cli.main import main
from cb_backend.contracts.config import EngineConfig
from tests.models.tiny_checkpoints import write_checkpoint

FILE = "model.safetensors"


@pytest.fixture
def broken(plain: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(plain, tmp_path / "copy"))


def look_at(path: Path, tokenizer: Path | None = None, **arguments: Any) -> Findings:
    return examine(EngineConfig(model=str(path), tokenizer=None if tokenizer is None else str(tokenizer), **arguments))


# ---- all refusals at once ------------------------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def test_all_that_is_wrong_is_said(broken: Path) -> None:
    up, gate = (f"model.layers.{layer}.mlp.{kind}_proj.weight" for layer, kind in ((0, "up"), (1, "gate")))
    edit(broken, lambda tensors: (tensors.pop(up), tensors.update({gate: torch.zeros(3, 3), "other": torch.ones(2)})))
    (broken / "tokenizer.json").unlink()
    refusals = look_at(broken, max_model_len=1 << 20).refusals
    assert len(refusals) == 5
    for text in (f"{up} is missing", f"{gate} has shape", "tensor other has no place", "max_model_len is", "tokenizer"):
        assert any(text in refusal for refusal in refusals), text


def test_two_broken_files_are_both_named(broken: Path) -> None:
    tensors = load_file(broken / FILE)
    (broken / FILE).unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:10], names[10:]), 1):
        file = broken / f"model-{number:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in part}, file)
        if number != 2:
            file.write_bytes(file.read_bytes()[:-10])
    refusals = look_at(broken).refusals
    assert [text.partition(" ")[0] for text in refusals[:2]] == [
        "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors",
    ]  # fmt: skip


def test_a_broken_file_is_all_that_is_said_of_its_tensors(broken: Path) -> None:
    """What it held is not known, so nothing of it is missing; what is wrong in other files is told beside it."""
    tensors = load_file(broken / FILE)
    (broken / FILE).unlink()
    names = sorted(tensors)
    tensors[names[0]] = torch.zeros(3, 3)
    for number, part in enumerate((names[:5], names[5:]), 1):
        file = broken / f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, file)
    file.write_bytes(file.read_bytes()[:-50])
    found = look_at(broken)
    refusals = [refusal for refusal in found.refusals if "tokenizer" not in refusal]
    assert len(refusals) == 2, refusals
    assert "model-00002-of-00002.safetensors is not a whole safetensors file" in refusals[0]
    assert f"{names[0]} has shape [3, 3]" in refusals[1]


def test_a_config_that_is_refused_does_not_hide_the_tokenizer(broken: Path) -> None:
    (broken / "config.json").write_text('{"model_type": "mamba"}')
    (broken / "tokenizer.json").write_text("{}")
    refusals = look_at(broken).refusals
    assert len(refusals) == 2
    assert refusals[0].startswith("model_type 'mamba' is not supported")
    assert refusals[1].startswith("tokenizer.json cannot be read")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["check", *arguments])
    return code, capsys.readouterr().out


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_report_names_what_matters(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (plain / "chat_template.jinja").write_text("{{ messages }}")
    code, text = run(capsys, str(plain))
    assert code == 0
    for part in (
        "safetensors, llama", "is served", "all layers see everything", "default, theta", "1 t1", "templates  default",
        "model.layers.*.self_attn.{q_proj,k_proj,v_proj,o_proj}", "F32", "of weights", "tokens: ",
    ):  # fmt: skip
        assert part in text, part
    assert all(card in text for card in CARDS)


def test_a_folder_without_weights_promises_no_room(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (broken / FILE).unlink()
    assert main(["check", str(broken)]) == 1
    text = capsys.readouterr().out
    assert "holds no .safetensors file" in text
    assert "of cache" in text.splitlines()[-1]
    assert "room" not in text


def test_windows_and_ropes_of_a_mixed_model_are_told(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint("gemma3", tmp_path)
    text = run(capsys, str(folder), "--tokenizer", str(tokenizer))[1]
    assert "4 layers see the newest 9, 2 layers see everything" in text
    assert "default, theta 700; linear, theta 50000, factor 8" in text


def test_json_has_everything(plain: Path, broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, str(plain), "--json", "--card", "h200")
    found = json.loads(text)
    assert code == 0
    assert found["is_served"]
    assert found["refusals"] == []
    assert found["architecture"]["num_layers"] == 2
    assert found["modules"][0]["modules"] == "model.embed_tokens"
    assert sum(group["num_bytes"] for group in found["modules"]) == found["weight_bytes"]
    assert [fit["card"] for fit in found["cards"]] == ["h200"]
    edit(broken, lambda tensors: tensors.clear() or tensors.update({"x": torch.ones(1)}))
    code, text = run(capsys, str(broken), "--json")
    assert code == 1
    assert len(json.loads(text)["refusals"]) > 20
    assert "more (--json has all)" in run(capsys, str(broken))[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["/nowhere/at/all"], "is neither a folder nor a file; nothing is fetched here"),
        (["org/name"], "is neither a folder nor a file"),
        ([], "FOLDER"),
        ([".", "--card", "abacus"], "invalid choice"),
        ([".", "--card", "l4", "--memory", "80GB"], "not allowed with"),
        ([".", "--max-model-len", "many"], "max_model_len"),
        ([".", "--kv-cache-dtype", "int3"], "kv_cache_dtype"),
    ],
)
def test_wrong_usage_is_another_exit_code(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", *arguments])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, str(tmp_path))
    assert code == 1
    assert "holds no config.json" in text


def test_no_gpu_is_asked_for_anything(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_available", "get_device_capability", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name} was called"))
    assert main(["check", str(plain), "--card", "h200"]) == 0
    assert check_cards.CARDS["h200"].capability == (9, 0)
