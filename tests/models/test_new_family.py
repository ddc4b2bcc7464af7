"""A family is added by one file, whose name is its model_type: nothing else is told of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.models import families
from cb_backend.models.registry import family_names, read_model_config
from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import random_tokens, reference_logits, write_checkpoint

SOURCE = '''"""Toys: Llama whose scores are scaled by what the configuration calls toy_scale."""

from __future__ import annotations

from dataclasses import replace

from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.families import llama
from cb_backend.models.spec import ModelSpec


def read_spec(reader: ConfigReader) -> ModelSpec:
    spec = llama.read_spec(reader)
    return replace(spec, attention=replace(spec.attention, scale=reader.positive_float("toy_scale")))
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "toy.py").write_text(SOURCE)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(folder)])
    yield
    sys.modules.pop("cb_backend.models.families.toy", None)
    vars(families).pop("toy", None)


def write(folder: Path, **changes: object) -> Path:
    write_checkpoint("llama-gqa", folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "model_type": "toy", **changes}))
    return folder


def test_a_file_is_a_family(toy: None, tmp_path: Path) -> None:
    prompt = random_tokens(20, seed=1)
    wanted = reference_logits(write_checkpoint("llama-gqa", tmp_path / "llama"), prompt, [])
    for scale, is_llama in ((12**-0.5, True), (1.0, False)):
        paged = PagedModel(write(tmp_path / str(scale), toy_scale=scale))
        paged.start(0, len(prompt))
        assert torch.allclose(paged.prefill(0, prompt), wanted, atol=1e-4) == is_llama
    assert "toy" in family_names()


def test_its_complaints_name_the_key(toy: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not set 'toy_scale'"):
        read_model_config(write(tmp_path / "toys"))


def test_without_the_file_there_is_no_such_family(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_type 'toy' is not supported; supported: exaone4, gemma2, "):
        read_model_config(write(tmp_path / "toys"))


@pytest.mark.parametrize("name", ["", "__init__", "../llama", "llama.py", "os"])
def test_only_files_of_families_are_families(name: str, tmp_path: Path) -> None:
    """A checkpoint names no other module."""
    with pytest.raises(ConfigError, match="is not supported; supported: "):
        read_model_config(write(tmp_path / "other", model_type=name))
