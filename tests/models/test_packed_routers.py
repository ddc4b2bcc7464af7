"""Routers in few bits, and modules that a configuration leaves out by a part of their names: the files tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cb_backend.cli.check_findings import examine
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.moe import MoE
from cb_backend.layers.ops import resolve_ops
from cb_backend.layers.packed_experts import PackedMixture
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.registry import load_model, outline_adapters, outline_spec, read_model_config, read_spec
from cb_backend.models.replacement import ModelWeights
from tests.models.paged_model import CPU, PagedModel
from tests.models.quantised_models import FORMATS, pair
from tests.models.test_packed_experts import OF_EXPERTS, TOLERANCE, difference

FAMILY = "qwen3-moe, 8 experts"
AWQ, AWQ_WRITER = FORMATS["awq 64"]


def refusals_of(folder: Path) -> list[str]:
    found = examine(EngineConfig(model=str(folder)))
    return [text for text in found.refusals if "tokenizer" not in text]


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_a_router_in_few_bits_is_written_out(name: str, tmp_path: Path) -> None:
    plain, quantised = pair(tmp_path, FAMILY, *FORMATS[name], has_routers=True)
    assert refusals_of(quantised) == []
    assert difference(plain, quantised) < TOLERANCE
    block = PagedModel(quantised).model.layers[0].mlp
    assert isinstance(block, MoE)
    assert block.router.weight.shape == (8, 128)


def test_what_is_said_of_it_is_what_is_kept(tmp_path: Path) -> None:
    plain, quantised = pair(tmp_path, FAMILY, AWQ, AWQ_WRITER, has_routers=True)
    found, whole = (examine(EngineConfig(model=str(folder))) for folder in (quantised, plain))
    assert found.num_parameters == whole.num_parameters
    (router,) = [group for group in found.groups or [] if group.modules.endswith("mlp.gate")]
    assert (router.stored, router.served, router.num_bytes) == ("I32, F16", "float32", 2 * 8 * 128 * 4)


def test_random_weights_have_routers_too(tmp_path: Path) -> None:
    folder = pair(tmp_path, FAMILY, AWQ, AWQ_WRITER, has_routers=True)[1]
    spec = read_model_config(folder)
    model = load_model(
        folder, spec, ops=resolve_ops("torch"), dtype=torch.float32, device=CPU, load_format="dummy", max_model_len=8
    )
    assert all(float(layer.mlp.router.weight.std()) > 0.01 for layer in model.layers if isinstance(layer.mlp, MoE))


@pytest.mark.parametrize("kept", [["gate"], ["mlp.gate"], ["mlp.gate."], None], ids=str)
@pytest.mark.parametrize("has_routers", [False, True], ids=["plain router", "packed router"])
def test_awqs_parts_of_names_mean_what_the_files_left_out(
    has_routers: bool, kept: list[str] | None, tmp_path: Path
) -> None:
    """`gate` is a part of `gate_proj`, and of `mlp.gate` as well."""
    config = {**AWQ, "modules_to_not_convert": kept}
    plain, quantised = pair(tmp_path, FAMILY, config, AWQ_WRITER, has_routers=has_routers)
    assert refusals_of(quantised) == []
    assert difference(plain, quantised) < TOLERANCE


@pytest.mark.parametrize("is_kept", [True, False], ids=["left out", "packed all the same"])
def test_of_dense_models_too(is_kept: bool, tmp_path: Path) -> None:
    config = {**AWQ, "modules_to_not_convert": ["gate"]}
    kept: dict[str, Any] = {"is_kept": lambda name: name.endswith("gate_proj")} if is_kept else {}
    plain, quantised = pair(tmp_path, "llama", config, AWQ_WRITER, **kept)
    assert difference(plain, quantised) < TOLERANCE


def test_a_router_that_is_kept_by_its_whole_name_must_be_plain(tmp_path: Path) -> None:
    config, writer = FORMATS["w4a16"]
    config = {**config, "ignore": ["lm_head", *(f"model.layers.{index}.mlp.gate" for index in range(2))]}
    folder = pair(tmp_path, FAMILY, config, writer, has_routers=True)[1]
    with pytest.raises(ConfigError, match=r"tensor model\.layers\.0\.mlp\.gate\.weight is missing"):
        PagedModel(folder)


@pytest.mark.parametrize("was_packed", [True, False])
def test_weights_whose_router_is_stored_otherwise_are_no_replacement(was_packed: bool, tmp_path: Path) -> None:
    """They would have no place, or a place would get nothing."""
    folders = []
    for has_routers in (was_packed, not was_packed):
        root = tmp_path / str(has_routers)
        root.mkdir()
        folders.append(pair(root, FAMILY, AWQ, AWQ_WRITER, has_routers=has_routers)[1])
    own, other = folders
    spec = read_model_config(own)
    model = load_model(own, spec, ops=resolve_ops("torch"), dtype=torch.float32, device=CPU, max_model_len=8)
    weights = ModelWeights(model, own, spec, None, has_kv_scales=False)
    weights.check(own)
    weights.fill(own, lambda: None)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.gate\..* is missing.*load it as a model of its own"):
        weights.check(other)


def test_without_files_what_awq_leaves_out_of_a_mixture_is_its_router() -> None:
    """Adapters are checked, and random weights made, by the configuration alone."""
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["gate"]}
    values: dict[str, Any] = {
        "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256,
        "moe_intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128,
        "norm_topk_prob": True, "dtype": "bfloat16", "quantization_config": config,
    }  # fmt: skip
    spec = read_spec(ConfigReader(values))
    for num_ranks in (1, 2):
        assert outline_adapters(spec, torch.bfloat16, 8, num_ranks).modules
    assert isinstance(outline_spec(spec, torch.bfloat16).layers[0].mlp.experts, PackedMixture)
