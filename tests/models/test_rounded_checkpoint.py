"""The demo's real model in w4a16: served as exactly its integers, and how near that is to the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cb_backend.cli.demo_model import ensure_demo_model
from cb_backend.cli.main import main
from tests.models.quantised_writers import pack_along
from tests.models.rounded_checkpoint import pack_words, round_groups, write_rounded
from tests.models.tiny_checkpoints import write_checkpoint


def test_words_are_those_of_the_slow_writer() -> None:
    integers = torch.randint(-8, 8, (5, 32), generator=torch.Generator().manual_seed(1))
    assert torch.equal(pack_words(integers, 4), pack_along((integers + 8).tolist(), 4))
    integers = torch.randint(-128, 128, (3, 16), generator=torch.Generator().manual_seed(2))
    assert torch.equal(pack_words(integers, 8), pack_along((integers + 128).tolist(), 8))


@pytest.mark.parametrize(("bits", "most"), [(4, 0.12), (8, 0.01)])
def test_rounding_loses_no_more_than_its_bits(bits: int, most: float) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    integers, scales = round_groups(weight, bits, 64)
    rounded = integers * scales.float().repeat_interleave(64, 1)
    assert 0 < float((rounded - weight).norm() / weight.norm()) < most


def lines_of(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}


def test_a_checkpoint_beside_the_model_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command as it is given, on a small model: 8 bits are nearer to it than 4."""
    from tests.server.tiny_checkpoint import write_tiny_checkpoint

    source = write_tiny_checkpoint(tmp_path / "tiny")
    w4, w8 = (write_rounded(source, tmp_path / f"w{bits}a16", bits, 64 if bits == 8 else 32) for bits in (4, 8))
    options = ["--model", str(source), "--prompts", "3", "--tokens", "5", "--device", "cpu", "--formats", ""]
    assert main(["bench", "accuracy", *options, "--beside", str(w4), "--beside", str(w8)]) == 0
    lines = lines_of(capsys)
    assert 0 < float(lines["w8a16"][1]) < float(lines["w4a16"][1])


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.server.tiny_checkpoint import write_tiny_checkpoint

    source, other = write_tiny_checkpoint(tmp_path / "tiny"), write_checkpoint("qwen3", tmp_path / "other")
    options = ["--model", str(source), "--prompts", "1", "--tokens", "1", "--device", "cpu", "--formats", ""]
    assert main(["bench", "accuracy", *options, "--beside", str(other)]) != 0
    assert "name a checkpoint of the same model" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
def test_smollm2_in_four_bits_is_near_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """576 and 1,536 inputs: nine and 24 groups of 64. Rounding without calibration, of a model that feels every one."""
    source = ensure_demo_model(print)
    w4, w8 = (write_rounded(source, tmp_path / f"w{bits}a16", bits, group) for bits, group in ((4, 32), (8, 64)))
    options = ["--prompts", "4", "--tokens", "10", "--device", "cpu", "--formats", "bf16"]
    assert main(["bench", "accuracy", *options, "--beside", str(w4), "--beside", str(w8)]) == 0
    lines = lines_of(capsys)
    found = {name: [float(each.rstrip("%")) for each in lines[name]] for name in ("bf16", "w8a16", "w4a16")}
    relative, divergence, same_top = ({name: row[column] for name, row in found.items()} for column in (2, 3, 4))
    assert relative["w8a16"] < 6 < relative["w4a16"] < 55
    assert divergence["bf16"] < divergence["w4a16"] < 0.8
    assert same_top["w4a16"] > 55
    assert same_top["w8a16"] > 90
