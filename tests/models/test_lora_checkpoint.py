"""Adapters' files: what PEFT writes is packed with nothing lost, and what cannot be served is refused by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.adapter_table import AdapterTable
from cb_backend.models.lora_checkpoint import PackedAdapter, check_adapter, read_adapter
from cb_backend.models.lora_config import ByModule
from cb_backend.models.registry import outline_adapters, read_model_config
from tests.models.adapters import ALL_MODULES, modules_of, write_adapter
from tests.models.tiny_checkpoints import write_checkpoint

PREFIX = "base_model.model.model.layers.0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return write_adapter(model, folder, r=4, lora_alpha=8, target_modules=ALL_MODULES)


@pytest.fixture
def adapter(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    return tmp_path


def table_of(model: Path, max_rank: int = 8, dtype: torch.dtype = torch.float32) -> AdapterTable:
    return outline_adapters(read_model_config(model), dtype, max_rank)


def read(model: Path, adapter: Path, **options: Any) -> PackedAdapter:
    return read_adapter(adapter, read_model_config(model), table_of(model, **options))


def with_config(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def with_tensors(adapter: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(model: Path, adapter: Path, match: str, **options: Any) -> None:
    """By the reader, and offline by the check alone where the header tells."""
    with pytest.raises(ConfigError, match=match):
        read(model, adapter, **options)


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


@pytest.mark.parametrize(("changes", "match"), [
    ({"use_dora": True}, "use_dora is True"),
    ({"bias": "lora_only"}, "bias is 'lora_only'"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    ({"trainable_token_indices": [1, 2]}, r"trainable_token_indices is \[1, 2\]"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is"),
    ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication is"),
    ({"use_qalora": True}, "use_qalora is True"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is"),
    ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens is"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported is 'LORA'"),
    ({"peft_type": None}, "peft_type is None"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the model's own"),
    ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
    ({"use_something_new": True}, "use_something_new is True, which is not known here"),
    ({"r": 0}, "'r' is 0"),
    ({"r": "8"}, "'r' must be of type int"),
    ({"lora_alpha": float("nan")}, "lora_alpha"),
    ({"rank_pattern": {"q_proj": -1}}, "'q_proj' is -1"),
    ({"rank_pattern": {"(q_proj": 4}}, "no regular expression"),
    ({"alpha_pattern": {"q_proj": "high"}}, "'q_proj' must be of type float"),
    ({"r": 5}, r"has shape \[4, 40\], the model and adapter_config.json ask for \[5, 40\]"),
], ids=str)  # fmt: skip
def test_options_that_are_refused(changes: dict[str, Any], match: str, model: Path, adapter: Path) -> None:
    with_config(adapter, **changes)
    refused(model, adapter, match)
    with pytest.raises(ConfigError, match=match):
        check_adapter(adapter, read_model_config(model), table_of(model))


def _rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


_Q_A = f"{PREFIX}.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(("change", "match"), [
    (lambda t: t.pop(_Q_A), r"layers\.0\.self_attn\.q_proj has lora_B but no lora_A"),
    (lambda t: t.pop(_Q_A.replace("lora_A", "lora_B")), "has lora_A but no lora_B"),
    (lambda t: t.update({_Q_A: torch.zeros(4, 47)}), r"has shape \[4, 47\]"),
    (lambda t: t.update({_Q_A: torch.zeros(3, 48)}), r"has shape \[3, 48\]"),
    (lambda t: t.update({_Q_A: torch.zeros(4, 48, dtype=torch.int8)}), "is I8"),
    (lambda t: t[_Q_A].fill_(float("nan")), "q_proj.lora_A.weight holds numbers that are not finite"),
    (lambda t: t[_Q_A][0].fill_(float("inf")), "not finite"),
    (lambda t: _rename(t, _Q_A, _Q_A.replace("layers.0", "layers.7")), "layers.7.self_attn.q_proj, which is no proj"),
    (lambda t: _rename(t, _Q_A, _Q_A.replace("model.layers", "vision.layers")), "which is no projection"),
    (lambda t: _rename(t, _Q_A, f"{PREFIX}.mlp.experts.3.gate_proj.lora_A.weight"), "is of experts, whose matrices"),
    (lambda t: _rename(t, _Q_A, "base_model.model.lm_head.lora_A.weight"), "is of the embedding or the head"),
    (lambda t: _rename(t, _Q_A, "base_model.model.model.embed_tokens.lora_embedding_A"), "not one of a plain adapter"),
    (lambda t: t.update({f"{PREFIX}.self_attn.q_proj.lora_magnitude_vector": torch.ones(48)}), "vector is not one of"),
    (lambda t: t.update({f"{PREFIX}.self_attn.q_proj.lora_B.bias": torch.ones(48)}), "lora_B.bias is not one of"),
    (lambda t: t.clear(), "holds no weights of an adapter"),
], ids=range(15))  # fmt: skip
def test_tensors_that_are_refused(
    change: Callable[[dict[str, Tensor]], object], match: str, model: Path, adapter: Path
) -> None:
    with_tensors(adapter, change)
    refused(model, adapter, match)


def test_a_rank_above_the_limit_names_both(model: Path, adapter: Path) -> None:
    refused(model, adapter, "has rank 4, above max_lora_rank 3; raise max_lora_rank", max_rank=3)
    assert read(model, adapter, max_rank=4).rank == 4


def test_numbers_that_a_narrow_type_cannot_hold(model: Path, adapter: Path) -> None:
    with_tensors(adapter, lambda tensors: tensors[_Q_A].fill_(1e6))
    refused(model, adapter, r"not finite \(in float16\)", dtype=torch.float16)
    assert read(model, adapter, dtype=torch.bfloat16).rank == 4


@pytest.mark.parametrize("spoil", [
    lambda folder: (folder / "adapter_config.json").unlink(),
    lambda folder: (folder / "adapter_config.json").write_text("{"),
    lambda folder: (folder / "adapter_model.safetensors").unlink(),
    lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12345678"),
    lambda folder: (folder / "adapter_model.safetensors").write_bytes(
        (folder / "adapter_model.safetensors").read_bytes()[:-5]
    ),
], ids=["no config", "half a config", "no weights", "rubbish", "cut off"])  # fmt: skip
def test_files_that_are_broken_are_named(spoil: Callable[[Path], object], model: Path, adapter: Path) -> None:
    spoil(adapter)
    refused(model, adapter, "adapter_(config.json|model.safetensors)")


def test_pickled_weights_are_refused_by_name(model: Path, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    refused(model, adapter, "adapter_model.bin is pickled and may run code")


def test_a_check_tells_everything_at_once(model: Path, adapter: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors.pop(_Q_A)
        tensors[f"{PREFIX}.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 3)
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 48)

    with_tensors(adapter, spoil)
    faults: list[str] = []
    check_adapter(adapter, read_model_config(model), table_of(model), faults.append)
    assert len(faults) == 3
    for part in ("lora_B but no lora_A", "has shape [4, 3]", "the embedding or the head"):
        assert sum(part in fault for fault in faults) == 1


def test_experts_refuse_adapters_and_attention_takes_them(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3-moe", tmp_path / "model")
    adapter = write_adapter(folder, tmp_path / "adapter", r=2, target_modules=["q_proj", "o_proj"])
    spec = read_model_config(folder)
    assert read_adapter(adapter, spec, table_of(folder)).num_modules == 2 * spec.num_layers
    with_tensors(adapter, lambda tensors: tensors.update(
        {f"{PREFIX}.mlp.experts.0.down_proj.lora_A.weight": torch.zeros(2, 40)}
    ))  # fmt: skip
    refused(folder, adapter, "experts.0.down_proj.lora_A.weight is of experts, whose matrices take no adapters")


def test_a_factor_beyond_float32_is_refused(model: Path, adapter: Path) -> None:
    with_config(adapter, lora_alpha=1e40)
    refused(model, adapter, "lora_alpha")
    with_config(adapter, lora_alpha=8, alpha_pattern={"q_proj": -1e300})
    refused(model, adapter, "q_proj")
    with_config(adapter, alpha_pattern={"q_proj": 10**400})
    refused(model, adapter, "q_proj")
    with_config(adapter, alpha_pattern={"q_proj": -1.5, "v_proj": 0})
    read(model, adapter)


def test_two_tensors_for_one_place_are_refused(model: Path, adapter: Path) -> None:
    """Under two names of one module: one of them would be lost."""

    def twice(tensors: dict[str, Tensor]) -> None:
        for half in "AB":
            tensors[f"layers.0.self_attn.q_proj.lora_{half}.weight"] = torch.ones_like(
                tensors[f"{PREFIX}.self_attn.q_proj.lora_{half}.weight"]
            )

    with_tensors(adapter, twice)
    refused(model, adapter, r"layers\.0\.self_attn\.q_proj\.lora_A\.weight")


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("key", ["([a-z0-9_.]+)+!", "(.|.)" * 40 + "!", ".*" * 12 + "!", r"(\w{1,9}){9}!"])
def test_a_pattern_that_would_never_end_is_refused(model: Path, adapter: Path, pattern: str, key: str) -> None:
    with_config(adapter, **{pattern: {key: 4}})
    refused(model, adapter, pattern)


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
