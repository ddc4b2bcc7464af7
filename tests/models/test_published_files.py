"""Configs and files as people publish them: read as transformers reads them, or refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.ops import resolve_ops
from cb_backend.models.registry import load_model, read_model_config
from cb_backend.models.weight_files import INDEX
from cb_backend.support.tokenizer_files import load_tokenizer
from tests.models.paged_model import CPU, PagedModel
from tests.models.tiny_checkpoints import random_tokens, reference_logits, write_checkpoint

FILE = "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4665ce\nsize 9951028193\n"
VOCAB_SIZE = 97


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-tied", tmp_path_factory.mktemp("tied"))


@pytest.fixture
def checkpoint(plain: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(plain, tmp_path / "copy"))


def edit_config(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def rename_tensors(folder: Path, new_name: Callable[[str], str]) -> None:
    tensors = {new_name(name): tensor for name, tensor in load_file(folder / FILE).items()}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def load(folder: Path) -> Any:
    return load_model(folder, read_model_config(folder), ops=resolve_ops("torch"), dtype=torch.float32, device=CPU)


def assert_equal(folder: Path, reference: Path | None = None) -> None:
    prompt = random_tokens(30, seed=1)
    paged = PagedModel(folder)
    paged.start(0, len(prompt))
    theirs = reference_logits(reference or folder, prompt, [])
    torch.testing.assert_close(paged.prefill(0, prompt), theirs, atol=1e-4, rtol=0)


def split(folder: Path, count: int = 3) -> list[Path]:
    """Cut model.safetensors into shards, without an index."""
    tensors = sorted(load_file(folder / FILE).items())
    paths = []
    for index in range(count):
        paths.append(folder / f"model-{index + 1:05d}-of-{count:05d}.safetensors")
        save_file(dict(tensors[index::count]), paths[-1], metadata={"format": "pt"})
    (folder / FILE).unlink()
    return paths


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size"])
def test_r08d_sizes_of_no_machine_are_named_before_memory_is_asked_for(checkpoint: Path, key: str) -> None:
    edit_config(checkpoint, **{key: 2**31 - 2})
    with pytest.raises(ConfigError, match=r"has shape .*config\.json asks for \[.*\]"):
        load(checkpoint)


# ---- weights ------------------------------------------------------------------------------------------------------


def test_r05e_a_tied_checkpoint_with_the_head_alone(tied: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tied, tmp_path / "copy"))
    rename_tensors(folder, lambda name: "lm_head.weight" if name == "model.embed_tokens.weight" else name)
    assert_equal(folder, tied)
    assert not load(folder).has_own_head


def test_r05e_an_untied_checkpoint_with_the_head_alone_is_refused(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / FILE)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, checkpoint / FILE)
    with pytest.raises(ConfigError, match=r"tensor model\.embed_tokens\.weight is missing"):
        load(checkpoint)


def test_r05e_a_tied_checkpoint_of_the_decoder_alone(tied: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tied, tmp_path / "copy"))
    rename_tensors(folder, lambda name: name.removeprefix("model."))
    assert_equal(folder)


def add_consolidated(folder: Path) -> None:
    save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, folder / "consolidated.safetensors")


def test_r07c_consolidated_weights_beside_shards_without_index(checkpoint: Path, plain: Path) -> None:
    split(checkpoint)
    add_consolidated(checkpoint)
    assert_equal(checkpoint, plain)


def test_r07c_an_adapter_beside_shards_without_index(checkpoint: Path, plain: Path) -> None:
    split(checkpoint)
    save_file({"base_model.model.lora_A.weight": torch.zeros(4, 4)}, checkpoint / "adapter_model.safetensors")
    assert_equal(checkpoint, plain)


def test_r07c_consolidated_weights_alone(checkpoint: Path, plain: Path) -> None:
    """With the names of transformers they are served; in the layout of their makers they are refused with the way."""
    (checkpoint / FILE).rename(checkpoint / "consolidated.safetensors")
    assert_equal(checkpoint, plain)
    add_consolidated(checkpoint)
    with pytest.raises(ConfigError, match=r"in consolidated\.safetensors, whose .*model\*\.safetensors"):
        load(checkpoint)


def test_r07c_a_shard_that_is_missing_is_named(checkpoint: Path) -> None:
    split(checkpoint)[1].unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00003\.safetensors is missing"):
        load(checkpoint)


@pytest.mark.parametrize(
    "text", ['{"weight_map": {"lm_head.weight": "model-1-of-2.safetensors"}}', "{", '{"weight_map": 1}']
)
def test_r07e_a_stale_index_beside_the_whole_file(checkpoint: Path, text: str) -> None:
    (checkpoint / INDEX).write_text(text)
    assert_equal(checkpoint)


@pytest.mark.parametrize("weight_map", [{"lm_head.weight": 5}, {"a": None}, [], {}])
def test_r07e_a_broken_index_is_named(checkpoint: Path, weight_map: Any) -> None:
    split(checkpoint)
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json (is broken|names no file)"):
        load(checkpoint)


def test_r06e_weights_that_are_a_git_lfs_pointer(checkpoint: Path) -> None:
    (checkpoint / FILE).write_text(POINTER)
    with pytest.raises(ConfigError, match=r"^model\.safetensors is a Git LFS pointer.*git lfs pull"):
        load(checkpoint)


def test_r06e_a_shard_that_is_a_git_lfs_pointer(checkpoint: Path) -> None:
    split(checkpoint)[2].write_text(POINTER)
    with pytest.raises(ConfigError, match=r"^model-00003-of-00003\.safetensors is a Git LFS pointer"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_r06e_configs_that_are_a_git_lfs_pointer(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_text(POINTER)
    with pytest.raises(ConfigError, match=rf"^{name} is a Git LFS pointer"):
        load(checkpoint)


def test_r06e_a_tokenizer_that_is_a_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(POINTER)
    with pytest.raises(ConfigError, match=r"^tokenizer\.json is a Git LFS pointer"):
        load_tokenizer(tmp_path)


# ---- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_r04m_a_byte_order_mark_is_passed_over(checkpoint: Path, name: str) -> None:
    expected = read_model_config(checkpoint)
    (checkpoint / name).write_text((checkpoint / name).read_text(), encoding="utf-8-sig")
    assert read_model_config(checkpoint) == expected


def test_r04m_a_byte_order_mark_in_the_index(checkpoint: Path, plain: Path) -> None:
    weight_map = {name: path.name for path in split(checkpoint) for name in load_file(path)}
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8-sig")
    assert_equal(checkpoint, plain)


def test_r04m_another_encoding_is_named(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text((checkpoint / "config.json").read_text(), encoding="utf-16")
    with pytest.raises(ConfigError, match=r"^config\.json is not text in UTF-8 \(byte 0xff at 0\); save it in UTF-8"):
        read_model_config(checkpoint)
