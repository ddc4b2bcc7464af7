"""`cb-backend adapters list|check`: pytest tests/cli/test_adapters.py"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cb_backend.cli.adapters import MOST_REFUSALS
from cb_backend.cli.main import main
from tests.server.tiny_adapters import write_adapter
from tests.server.tiny_checkpoint import write_tiny_checkpoint

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def repository(checkpoint: Path, tmp_path: Path) -> Path:
    """`llm` with two adapters in its list, and `wolf`, a model that is one."""
    version = tmp_path / "models" / "llm" / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps({"model": str(checkpoint), "enable_lora": True}))
    for seed, name in enumerate(("doll", "sheep")):
        write_adapter(version / "adapters" / name, checkpoint, seed, rank=4 + 4 * seed)
    (version / "multi_lora.json").write_text(json.dumps({name: f"adapters/{name}" for name in ("doll", "sheep")}))
    own = tmp_path / "models" / "wolf" / "1"
    write_adapter(own / "files", checkpoint, 7)
    (own / "model.json").write_text('{"engine_of": "llm", "lora": "files"}')
    return tmp_path / "models"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["adapters", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize("below", ["", "llm", "llm/1", "wolf"])
def test_a_repository_a_model_and_a_version_are_listed(
    repository: Path, below: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "list", repository / below)
    assert code == 0
    first, *rows = out.splitlines()
    assert first == f"{repository / 'llm' / '1'}: 3 adapters"
    assert [row.split()[0] for row in rows] == ["doll", "sheep", "wolf"]
    assert "rank 4" in rows[0]
    assert "rank 8" in rows[1]


def test_all_that_is_served_is_said_with_the_memory_it_takes(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "check", repository)
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines()[1:4]] == ["served"] * 3
    assert out.splitlines()[-1].startswith("  3 in one batch, of rank 16 at most: ")
    assert out.endswith(" of the device's memory\n")
    settings = repository / "llm" / "1" / "model.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "tensor_parallel_size": 2}))
    code, shared, _ = run(capsys, "check", repository)
    assert code == 0
    assert shared.endswith(" of each of 2 devices' memory\n")
    assert shared.splitlines()[:4] == out.splitlines()[:4]


def poison(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


def drop_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(name for name in tensors if "lora_B" in name)]


def embed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_A.weight"] = torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("change", "reason"), [(poison, "not finite"), (drop_one, "has lora_A but no lora_B"), (embed, "embed")]
)
def test_weights_that_would_be_refused(
    repository: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = repository / "llm" / "1" / "adapters" / "sheep" / WEIGHTS
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    code, out, _ = run(capsys, "check", repository)
    assert code == 1
    lines = out.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("  ") and "rank" in line][:3] == [
        "served", "refused", "served"
    ]  # fmt: skip
    assert reason in next(line for line in lines if line.startswith("    - "))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "r"),
    ],
)
def test_a_config_that_would_be_refused(
    repository: Path, changes: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = repository / "llm" / "1" / "adapters" / "doll" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    code, out, _ = run(capsys, "check", repository / "llm", "--json")
    assert code == 1
    [model] = json.loads(out)
    refusals = {adapter["name"]: adapter["refusals"] for adapter in model["adapters"]}
    assert [len(refusals[name]) for name in ("doll", "sheep", "wolf")] == [1, 0, 0]
    assert reason in refusals["doll"][0]


def test_a_rank_above_the_limit_and_a_folder_that_is_not_there(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = repository / "llm" / "1" / "multi_lora.json"
    listed.write_text(json.dumps({"doll": "adapters/doll", "sheep": "adapters/sheep", "ghost": "nowhere"}))
    code, out, _ = run(capsys, "check", repository, "--max-lora-rank", 4)
    assert code == 1
    assert "rank 8, above max_lora_rank 4" in out
    assert f"the folder {listed.parent / 'nowhere'} is not there" in out
    [model] = json.loads(run(capsys, "check", repository, "--max-lora-rank", 4, "--json")[1])
    num_refused = {adapter["name"]: len(adapter["refusals"]) for adapter in model["adapters"]}["sheep"]
    assert num_refused > MOST_REFUSALS, "one for each of its modules"
    assert out.count("above max_lora_rank 4") == MOST_REFUSALS
    assert f"\n    - and {num_refused - MOST_REFUSALS} more (--json has all)\n" in out


def test_one_adapter_needs_its_checkpoint(
    repository: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = repository / "wolf" / "1" / "files"
    code, _, err = run(capsys, "check", folder)
    assert code == 1
    assert "say with --model" in err
    assert run(capsys, "list", folder)[0] == 0
    code, out, _ = run(capsys, "check", folder, "--model", checkpoint)
    assert code == 0
    assert "served" in out


def test_a_list_is_checked_before_adapters_are_enabled(
    repository: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "llm" / "1" / "model.json").write_text(json.dumps({"model": str(checkpoint)}))
    code, out, _ = run(capsys, "check", repository / "llm")
    assert code == 0
    assert "enable_lora is not set" in out
    code, _, err = run(capsys, "check", repository)
    assert code == 1
    assert "no model with enable_lora" in err


def test_wrong_usage(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["adapters", "list", str(tmp_path / "nowhere")])
    assert ended.value.code == 2
    capsys.readouterr()
    (repository / "llm" / "1" / "multi_lora.json").write_text("{")
    code, _, err = run(capsys, "list", repository)
    assert code == 1
    assert "multi_lora.json is not valid JSON" in err
    (repository / "llm" / "1" / "model.json").write_text('{"model": "org/none", "enable_lora": true}')
    (repository / "llm" / "1" / "multi_lora.json").write_text("{}")
    code, _, err = run(capsys, "check", repository)
    assert code == 1
    assert "'org/none' is not on this machine; name its folder with --model" in err
