"""The dtype of a checkpoint whose config names none: that of its own weights, as transformers' "auto" has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cb_backend.cli.check_findings import examine
from cb_backend.contracts.config import EngineConfig
from cb_backend.engine.runner.runner_factory import read_model_config as as_the_engine_reads
from cb_backend.models.registry import read_model_config, resolve_dtype
from tests.models.published_families import FAMILIES
from tests.models.tiny_checkpoints import write_checkpoint

GPU = torch.device("cuda")
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
KEYS = ("dtype", "torch_dtype")


def written(folder: Path, dtype: torch.dtype, name: str = "llama-gqa", **save_options: Any) -> Path:
    """A checkpoint in this dtype, whose config names none."""
    write_checkpoint(name, folder, **save_options)
    for file in folder.glob("*.safetensors"):
        tensors = {key: tensor.to(dtype) for key, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return changed(folder, lambda values: [values.pop(key, None) for key in KEYS])


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.get)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "60KB"}], ids=["one file", "shards"])
def test_it_is_the_weights(options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    folder = written(tmp_path, dtype, **options)
    assert len(list(folder.glob("*.safetensors"))) == 1 or options
    assert resolve_dtype("auto", as_the_engine_reads(folder), GPU) == dtype
    assert examine(EngineConfig(model=str(folder))).dtype == dtype
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == dtype


@pytest.mark.parametrize("name", ["llama-gqa", "llama-tied"])
def test_null_is_as_good_as_nothing(name: str, tmp_path: Path) -> None:
    folder = changed(written(tmp_path, torch.float16, name), lambda values: values.update(dtype=None))
    assert read_model_config(folder).dtype == "float16"


def test_what_the_config_names_counts(tmp_path: Path) -> None:
    folder = changed(written(tmp_path, torch.float16), lambda values: values.update(torch_dtype="bfloat16"))
    assert read_model_config(folder).dtype == "bfloat16"


def test_it_is_the_embeddings_where_others_differ(tmp_path: Path) -> None:
    """Norms and routers are often kept in float32, and scales of packed weights in float16."""
    folder = written(tmp_path, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    is_embedding = "embed_tokens.weight"
    others = {key: value if key.endswith(is_embedding) else value.float() for key, value in tensors.items()}
    save_file(others, folder / "model.safetensors", metadata={"format": "pt"})
    assert read_model_config(folder).dtype == "bfloat16"


def test_it_is_the_heads_where_a_tied_matrix_is_stored_as_the_head(tmp_path: Path) -> None:
    folder = written(tmp_path, torch.bfloat16, "llama-tied")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert read_model_config(folder).dtype == "bfloat16"


@pytest.mark.parametrize(("outer", "inner", "dtype"), [
    ({}, {}, "float16"), ({"torch_dtype": "bfloat16"}, {}, "bfloat16"), ({}, {"dtype": "bfloat16"}, "bfloat16"),
    ({"dtype": "bfloat16"}, {"dtype": None}, "bfloat16"),
])  # fmt: skip
def test_of_a_part_of_a_checkpoint_both_places_count(
    outer: dict[str, Any], inner: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    values = json.loads(json.dumps(FAMILIES["gemma-3, with pictures"]))
    for section, told in ((values, outer), (values["text_config"], inner)):
        for key in KEYS:
            section.pop(key, None)
        section.update(told)
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({"language_model.model.embed_tokens.weight": torch.zeros(8, 4).half()}, tmp_path / "model.safetensors")
    assert read_model_config(tmp_path).dtype == dtype


@pytest.mark.parametrize(("name", "dtype"), [("gpt-oss", "bfloat16"), ("Qwen3", "float32")])
def test_without_weights_it_is_the_familys(name: str, dtype: str, tmp_path: Path) -> None:
    """Those of gpt-oss were published in bfloat16, by configs that do not say so; else transformers' default."""
    values = {key: value for key, value in FAMILIES[name].items() if key not in KEYS}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_model_config(tmp_path).dtype == dtype


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{"])
def test_a_broken_file_is_told_of_when_it_is_loaded(content: bytes, tmp_path: Path) -> None:
    folder = written(tmp_path, torch.bfloat16)
    (folder / "model.safetensors").write_bytes(content)
    assert read_model_config(folder).dtype == "float32"
    assert any("is not a whole safetensors file" in text for text in examine(EngineConfig(model=str(folder))).refusals)


def test_of_gpt_oss_the_configs_are_as_published() -> None:
    assert not {*KEYS} & {*FAMILIES["gpt-oss"]}
