"""Models with packed weights against the same weights written out: every format, through the readers and the layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.weight_format import PlainFormat
from cb_backend.models import weights
from cb_backend.models.registry import read_model_config
from tests.models import quantised_writers as writers
from tests.models.paged_model import PagedModel
from tests.models.quantised_checkpoints import Writer
from tests.models.quantised_models import (
    AWQ,
    FAMILIES,
    FORMATS,
    GPTQ,
    SIZES,
    gptq,
    logits,
    of_group,
    pack,
    pack_quantized,
    pair,
)

# Of `test_packed_experts`, which tells what of these formats is refused.
WITH_EXPERTS = ("qwen3-moe", "qwen3-moe, 8 experts", "mixtral")
# All formats of projections that are fused and of such that are not; of the others one by columns, and one by blocks
TRIED = [
    (family, name)
    for family in FAMILIES
    if family not in WITH_EXPERTS
    for name in ("awq 64", "gptq act-order", "fp8 blocks", "nvfp4")
    if family.startswith(("llama", "qwen", "phi3")) or name in ("gptq act-order", "fp8 blocks")
]


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_model_is_the_model_of_its_numbers(name: str, tmp_path: Path) -> None:
    config, writer = FORMATS[name]
    plain, quantised = pair(tmp_path, "llama", config, writer)
    wanted = logits(plain)
    assert wanted.std() > 0.05, "weights that matter"
    torch.testing.assert_close(logits(quantised), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "name"), TRIED)
def test_families(family: str, name: str, tmp_path: Path) -> None:
    config, writer = FORMATS[name]
    plain, quantised = pair(tmp_path, family, config, writer)
    torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("config", "writer"),
    [
        ({**AWQ, "group_size": 128}, of_group(writers.write_awq, 128)),
        ({**GPTQ, "group_size": 128}, of_group(gptq, 128)),
        ({**GPTQ, "group_size": 128, "sym": True}, of_group(gptq, 128, is_symmetric=True)),
        ({**GPTQ, "group_size": 128, "desc_act": True}, of_group(gptq, 128, is_act_order=True)),
        ({**GPTQ, "group_size": 128, "bits": 8, "desc_act": True}, of_group(gptq, 128, bits=8, is_act_order=True)),
        (pack_quantized(4, 128), of_group(pack, 128)),
        (pack_quantized(4, 128, symmetric=False), of_group(pack, 128, has_zeros=True)),
        (pack_quantized(4, 128, actorder="group"), of_group(pack, 128, is_act_order=True)),
        (pack_quantized(8, 128), of_group(pack, 128, bits=8)),
    ],
)
def test_groups_of_128_beside_biases(config: dict[str, Any], writer: Writer, tmp_path: Path) -> None:
    plain, quantised = pair(tmp_path, "llama, wide", config, writer)
    torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({**AWQ, "group_size": 64, "modules_to_not_convert": ["o_proj"]}, "o_proj"),
        ({**GPTQ, "group_size": 64, "dynamic": {r"-:.*\.down_proj": {}}}, "down_proj"),
        ({**pack_quantized(4, 64), "ignore": ["lm_head", "re:.*self_attn.*"]}, "self_attn"),
        ({**pack_quantized(4, 64), "ignore": ["lm_head", "model.layers.1.mlp.down_proj"]}, "layers.1.mlp.down_proj"),
    ],
)
def test_modules_that_are_left_as_they_are(config: dict[str, Any], kept: str, tmp_path: Path) -> None:
    writer = FORMATS[{"awq": "awq 64", "gptq": "gptq 64"}.get(config["quant_method"], "w4a16")][1]
    plain, quantised = pair(tmp_path, "llama", config, writer, is_kept=lambda name: kept in name)
    torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)


def test_other_settings_of_some_modules(tmp_path: Path) -> None:
    """GPTQModel's `dynamic` may give modules bits and groups of their own."""
    config = {**GPTQ, "group_size": 32, "dynamic": {r"+:.*\.down_proj": {"bits": 8, "group_size": 64}}}

    def write(out_size: int, in_size: int, seed: int) -> writers.Written:
        is_down = in_size == SIZES["intermediate_size"]
        return gptq(out_size, in_size, 64 if is_down else 32, bits=8 if is_down else 4, seed=seed)

    plain, quantised = pair(tmp_path, "llama", config, write)
    torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("dynamic", "kept"),
    [
        ({r"-:model\.layers\.0\.|model\.layers\.1\.mlp\.": {}}, ("layers.0.", "layers.1.mlp")),
        ({r"-:.*\.k_proj|.*\.down_proj": None}, ("k_proj", "down_proj")),
        # The first that matches decides, in the order of the configuration
        ({r"+:.*layers\.1\.": {"group_size": 32}, r"-:.*\.down_proj": {}}, ("layers.0.mlp.down_proj",)),
        ({r"-:.*\.down_proj": {}, r"+:.*layers\.1\.": {"group_size": 32}}, ("down_proj",)),
        ({r"+:.*layers\.0\.|.*layers\.1\.": {"group_size": 32}}, ()),
    ],
)
def test_expressions_of_dynamic_are_gptqmodels(dynamic: dict[str, Any], kept: tuple[str, ...], tmp_path: Path) -> None:
    """Alternatives belong together, and each is one of a name's start."""
    config = {**GPTQ, "group_size": 32, "dynamic": dynamic}
    plain, quantised = pair(
        tmp_path, "llama", config, of_group(gptq, 32), is_kept=lambda module: any(part in module for part in kept)
    )
    formats = read_model_config(quantised).formats
    assert formats is not None
    for layer in range(2):
        for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{module}"
            assert isinstance(formats(name), PlainFormat) == any(part in name for part in kept), name
    torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)


def test_parts_whose_orders_differ_are_products_of_their_own(tmp_path: Path) -> None:
    """Seeds differ by module, so q, k and v have orders of their own, and gate and up as well."""
    config, writer = FORMATS["gptq act-order"]
    _, quantised = pair(tmp_path, "llama", config, writer)
    layer = PagedModel(quantised).model.layers[0]
    assert len(layer.self_attn.qkv_proj.pieces) == 3
    assert len(layer.mlp.gate_up_proj.pieces) == 2
    same = partial(gptq, is_act_order=True)
    (tmp_path / "same").mkdir()
    _, quantised = pair(tmp_path / "same", "llama", config, lambda out, size, seed: same(out, size, 32, seed=1))
    layer = PagedModel(quantised).model.layers[0]
    assert [len(one.pieces) for one in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj)] == [1, 1]
    assert layer.mlp.gate_up_proj.pieces[0].weight.is_gated


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("model.layers.0.mlp.up_proj.qzeros", "tensor model.layers.0.mlp.up_proj.qzeros is missing"),
        ("shape", r"has shape \[128, 16\], config.json asks for \[128, 24\]"),
        ("nan", "belongs to a matrix with a scale that is not finite"),
    ],
)
def test_broken_files_are_named(broken: str, reason: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    config, writer = FORMATS["awq 64"]
    _, quantised = pair(tmp_path, "llama", config, writer)
    tensors = load_file(quantised / "model.safetensors")
    if broken == "shape":
        tensors["model.layers.0.mlp.up_proj.qweight"] = tensors["model.layers.0.self_attn.q_proj.qweight"].clone()
    elif broken == "nan":
        tensors["model.layers.1.mlp.down_proj.scales"][0, 3] = float("nan")
    else:
        del tensors[broken]
    save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=reason):
        PagedModel(quantised)


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_have_the_formats_shape(name: str, tmp_path: Path) -> None:
    """`load_format` dummy, by which checkpoints are measured that nobody has."""
    from cb_backend.layers.ops import resolve_ops
    from cb_backend.models.registry import load_model

    LlamaConfig(**SIZES, quantization_config=FORMATS[name][0]).save_pretrained(tmp_path)
    spec = read_model_config(tmp_path)
    model = load_model(
        tmp_path, spec, ops=resolve_ops("torch"), dtype=torch.float32, device=torch.device("cpu"), load_format="dummy"
    )
    for layer in model.layers:
        assert layer.mlp.down_proj.pieces[0].weight.size == (128, 192)
        assert [piece.weight.size for piece in layer.self_attn.qkv_proj.pieces] == [(256, 128)]


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_may_come_in_any_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads read them, of several files; a machine with few cores never shows it."""
    _, quantised = pair(tmp_path, "llama", *FORMATS[name])
    wanted, read = logits(quantised), weights.read_tensors

    def read_backwards(reads: list[Any], *args: Any) -> None:
        read(reads[::-1], *args, num_lanes=1)

    monkeypatch.setattr(weights, "read_tensors", read_backwards)
    assert torch.equal(logits(quantised), wanted)
