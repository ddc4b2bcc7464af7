"""Adapters' files: what PEFT writes is packed with nothing lost, in any subset and by any patterns."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cb_backend.contracts.errors import UnavailableError
from cb_backend.layers.adapter_table import AdapterTable
from cb_backend.models import lora_checkpoint
from cb_backend.models.lora_checkpoint import PackedAdapter, read_adapter
from cb_backend.models.lora_config import ByModule, LoraConfig, read_lora_config
from cb_backend.models.registry import read_model_config
from cb_backend.support.adapter_files import folder_stamp
from tests.models.adapters import ALL_MODULES, modules_of, write_adapter
from tests.models.spoiled_adapters import (
    PREFIX,
    adapter,
    made,
    model,
    read,
    refused,
    table_of,
    with_config,
    with_tensors,
)
from tests.models.tiny_checkpoints import write_checkpoint

__all__ = ["adapter", "made", "model"]  # fixtures


def delta(packed: PackedAdapter, table: AdapterTable, module: str) -> Tensor:
    """scale * B A of a module, out of the packed memory."""
    site, index = table.modules[module]
    a, b, scales = site.weights(packed.data)
    rows = site.modules[index].rows
    own = a[index * table.rank : (index + 1) * table.rank]
    return scales[index] * b[rows].float() @ own.float()


def test_every_module_is_packed_where_the_model_has_it(model: Path, made: Path) -> None:
    table, tensors = table_of(model), load_file(made / "adapter_model.safetensors")
    packed = read_adapter(made, read_model_config(model), table)
    assert (packed.rank, packed.num_modules) == (4, 14)
    assert packed.nbytes == table.bytes_per_adapter
    assert len(table.modules) == 14
    for module in table.modules:
        a, b = (tensors[f"base_model.model.{module}.lora_{half}.weight"] for half in "AB")
        assert torch.allclose(delta(packed, table, module), 2.0 * b @ a, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_cast_to_the_models_type_and_scales_are_not(dtype: torch.dtype, model: Path, made: Path) -> None:
    table = table_of(model, dtype=dtype)
    packed = read_adapter(made, read_model_config(model), table)
    site, _ = table.modules["model.layers.1.self_attn.o_proj"]
    a, b, scales = site.weights(packed.data)
    assert (a.dtype, b.dtype, scales.dtype) == (dtype, dtype, torch.float32)
    stored = load_file(made / "adapter_model.safetensors")[
        "base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"
    ]
    assert torch.equal(a[:4], stored.to(dtype))
    assert not a[4:].any()


@pytest.mark.parametrize("options", [
    {"target_modules": ["q_proj"]}, {"target_modules": "all-linear"}, {"target_modules": r".*\.(up|v)_proj"},
    {"target_modules": ["down_proj"], "layers_to_transform": [1]},
    {"target_modules": ["k_proj", "gate_proj"], "init_lora_weights": "gaussian", "lora_dropout": 0.1},
], ids=str)  # fmt: skip
def test_any_subset_of_modules(options: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """However it was asked for: what counts are the tensors."""
    adapter, table = write_adapter(model, tmp_path, r=2, **options), table_of(model)
    packed = read_adapter(adapter, read_model_config(model), table)
    stored = load_file(adapter / "adapter_model.safetensors")
    names = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in stored}
    assert packed.num_modules == len(names)
    for module in table.modules:
        assert bool(delta(packed, table, module).any()) == (module in names)


def test_ranks_and_factors_by_patterns(model: Path, tmp_path: Path) -> None:
    options = {"rank_pattern": {"q_proj": 1, r"layers\.1\.mlp\.up_proj": 7}, "alpha_pattern": {"up_proj": 21}}
    adapter, table = (
        write_adapter(model, tmp_path, r=4, lora_alpha=6, target_modules=ALL_MODULES, **options),
        table_of(model),
    )
    packed = read_adapter(adapter, read_model_config(model), table)
    assert packed.rank == 7
    for module, wanted in (("self_attn.q_proj", 6.0), ("mlp.up_proj", 3.0), ("mlp.down_proj", 1.5)):
        site, index = table.modules[f"model.layers.1.{module}"]
        assert float(site.weights(packed.data)[2][index]) == wanted


def test_the_key_is_of_the_content(model: Path, made: Path, adapter: Path) -> None:
    key = read(model, made).key
    assert len(key) == 16
    with_config(adapter, base_model_name_or_path="elsewhere", lora_dropout=0.5)
    assert read(model, adapter).key == key
    with_config(adapter, lora_alpha=9)
    scaled = read(model, adapter).key
    with_config(adapter, lora_alpha=8)
    with_tensors(adapter, lambda tensors: tensors[f"{PREFIX}.mlp.up_proj.lora_A.weight"].add_(1e-3))
    assert len({key, scaled, read(model, adapter).key}) == 3


def replaced_while_it_is_read(monkeypatch: pytest.MonkeyPatch, folder: Path, versions: list[Path]) -> list[int]:
    """The folder's files are those of the next version whenever its config has been read; how often that was."""
    reads = [0]

    def reading(path: Path) -> LoraConfig:
        config = read_lora_config(path)
        for file in versions[min(reads[0], len(versions) - 1)].iterdir():
            if reads[0] < len(versions):
                shutil.copy(file, folder / f".{file.name}")
                (folder / f".{file.name}").replace(folder / file.name)
        reads[0] += 1
        return config

    monkeypatch.setattr(lora_checkpoint, "read_lora_config", reading)
    return reads


def test_config_and_weights_are_of_one_version(
    model: Path, made: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the factor has changed, and where the old config does not fit the new weights."""
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    with_config(other, lora_alpha=99)
    with_tensors(other, lambda tensors: tensors[f"{PREFIX}.mlp.up_proj.lora_A.weight"].add_(1.0))
    larger = write_adapter(model, tmp_path / "larger", r=7, target_modules=["q_proj"])
    for version in (other, larger):
        wanted = read(model, version)
        with monkeypatch.context() as patch:
            reads = replaced_while_it_is_read(patch, adapter, [version])
            packed = read(model, adapter)
        assert packed.key == wanted.key
        assert packed.stamp == folder_stamp(adapter)
        assert reads == [2]


def test_files_that_do_not_stop_to_change_are_not_served(
    model: Path, made: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = [Path(shutil.copytree(made, tmp_path / str(number))) for number in range(9)]
    reads = replaced_while_it_is_read(monkeypatch, adapter, versions)
    with pytest.raises(UnavailableError, match=r"changed 3 times while they were read; write them into a new folder"):
        read(model, adapter)
    assert reads == [3]


@pytest.mark.parametrize("name", ["phi3", "glm4"])
def test_fused_matrices_are_adapted_as_the_checkpoint_has_them(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path / "model")
    adapter = write_adapter(folder, tmp_path / "adapter", r=2, target_modules=modules_of(name))
    table = table_of(folder)
    read_adapter(adapter, read_model_config(folder), table)
    fused = [module for module in table.modules if module.endswith(("qkv_proj", "gate_up_proj"))]
    assert len(fused) == (4 if name == "phi3" else 2)
    # The parts of what is fused are no modules there, so an adapter of them is of another model.
    llama = write_checkpoint("llama-gqa", tmp_path / "llama")
    others = write_adapter(llama, tmp_path / "others", r=2, target_modules=["gate_proj"])
    refused(folder, others, "gate_proj, which is no projection of this model's layers")


def test_experts_refuse_adapters_and_attention_takes_them(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3-moe", tmp_path / "model")
    adapter = write_adapter(folder, tmp_path / "adapter", r=2, target_modules=["q_proj", "o_proj"])
    spec = read_model_config(folder)
    assert read_adapter(adapter, spec, table_of(folder)).num_modules == 2 * spec.num_layers
    with_tensors(adapter, lambda tensors: tensors.update(
        {f"{PREFIX}.mlp.experts.0.down_proj.lora_A.weight": torch.zeros(2, 40)}
    ))  # fmt: skip
    refused(folder, adapter, "experts.0.down_proj.lora_A.weight is of experts, whose matrices take no adapters")


def test_patterns_of_every_module_of_a_large_model_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that were shared out module by module: more expressions than `re` remembers."""
    names = [f"model.layers.{layer}.{part}_proj" for layer in range(80) for part in "qkvogud"]
    patterns = ByModule({name: rank for rank, name in enumerate(names, 1)}, "rank_pattern")
    for call in ("compile", "match"):
        monkeypatch.setattr(re, call, lambda *given: pytest.fail(f"{given} is compiled again"))
    assert [patterns.of(name, 0) for name in names] == [*range(1, 1 + len(names))]
    assert [patterns.of(f"base.{name}", 0) for name in names] == [*range(1, 1 + len(names))]
    assert patterns.of("model.layers.80.q_proj", 0) == 0


@pytest.mark.parametrize(
    "key", [r"^model\.layers\.(\d+)\.self_attn.*", "(q|k|v)_proj", r"layers\.[0-9*+?{]+\.mlp", r"(?:o|q)_proj"]
)
def test_patterns_as_people_write_them_are_taken(model: Path, adapter: Path, key: str) -> None:
    with_config(adapter, rank_pattern={key: 4})
    read(model, adapter)


def test_no_memory_is_no_fault_of_the_adapter(model: Path, made: Path) -> None:
    table = table_of(model)
    table.bytes_per_adapter = 1 << 60
    with pytest.raises(MemoryError):
        read_adapter(made, read_model_config(model), table)
