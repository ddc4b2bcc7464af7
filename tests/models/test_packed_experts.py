"""Experts in every format: the model is the model of the numbers that its weights stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.packed import dequantise_packed_torch
from cb_backend.layers.moe import MoE
from cb_backend.layers.ops import resolve_ops
from cb_backend.layers.packed_experts import PackedMixture
from cb_backend.models.registry import load_model, outline_model, read_model_config
from tests.models.paged_model import CPU, PagedModel
from tests.models.quantised_models import FORMATS, logits, pair
from tests.models.quantised_writers import write_mxfp4
from tests.models.tiny_checkpoints import write_checkpoint

TOLERANCE = 1e-4
OF_EXPERTS = [
    "awq 32, bf16 scales", "gptq 64", "gptq symmetric", "w4a16", "w4a16, zeros", "w4a16, channel", "w8a16", "w8a8",
    "fp8 blocks", "mxfp4",
]  # fmt: skip


def difference(left: Path, right: Path) -> float:
    return float((logits(left) - logits(right)).abs().max())


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_a_quantised_mixture_is_the_model_of_its_numbers(name: str, tmp_path: Path) -> None:
    plain, quantised = pair(tmp_path, "qwen3-moe", *FORMATS[name])
    assert difference(plain, quantised) < TOLERANCE


@pytest.mark.parametrize("name", ["gptq 64", "w4a16", "w8a16", "fp8 blocks"])
def test_another_family_has_them_too(name: str, tmp_path: Path) -> None:
    """By Mixtral's names."""
    plain, quantised = pair(tmp_path, "mixtral", *FORMATS[name])
    assert difference(plain, quantised) < TOLERANCE


def as_mxfp4(folder: Path) -> Path:
    """gpt-oss's experts as they are published, and `folder` with the numbers of that."""
    quantised = folder.parent / "quantised"
    shutil.copytree(folder, quantised)
    tensors = load_file(folder / "model.safetensors")
    stored = dict(tensors)
    for seed, name in enumerate(sorted(tensors)):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, in_size, out_size = tensors[name].shape
        written = [write_mxfp4(out_size, in_size, seed * 100 + expert) for expert in range(count)]
        tensors[name] = torch.stack([weight.float().t() for _, weight in written]).contiguous()
        del stored[name]
        for part in ("blocks", "scales"):
            stored[f"{name}_{part}"] = torch.stack([each[part] for each, _ in written])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (quantised / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    return quantised


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    return write_checkpoint("gpt-oss-mxfp4", tmp_path / "plain")


def test_experts_of_gpt_oss_are_read_as_published(gpt_oss: Path) -> None:
    quantised = as_mxfp4(gpt_oss)
    assert difference(gpt_oss, quantised) < TOLERANCE
    mixture = PagedModel(quantised).model.layers[0].mlp
    assert isinstance(mixture, MoE)
    assert isinstance(mixture.experts, PackedMixture)
    assert mixture.experts.bits == 4


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"model.layers.0.mlp.experts.down_proj_scales": None}, "down_proj_scales is missing"),
        ({"model.layers.1.mlp.experts.gate_up_proj_blocks": (4, 128, 2, 16)}, "gate_up_proj_blocks has shape"),
        ({"model.layers.0.mlp.experts.5.up_proj.weight": (4, 4)}, "has no place in the model"),
    ],
)
def test_broken_files_of_gpt_oss_are_named(broken: dict[str, Any], message: str, gpt_oss: Path) -> None:
    quantised = as_mxfp4(gpt_oss)
    tensors = load_file(quantised / "model.safetensors")
    for name, shape in broken.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.zeros(shape, dtype=torch.uint8)
    save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        PagedModel(quantised)


def test_experts_of_gpt_oss_that_were_written_out_need_no_other_configuration(gpt_oss: Path) -> None:
    """A merged or fine-tuned model may keep what its base's configuration says."""
    quantised = as_mxfp4(gpt_oss)
    wanted = logits(gpt_oss)
    shutil.copy(gpt_oss / "model.safetensors", quantised / "model.safetensors")
    torch.testing.assert_close(logits(quantised), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "granitemoe", "gpt-oss", "glm4-moe", "qwen2-moe"])
def test_experts_are_quantised_to_fp8_while_they_are_loaded(name: str, tmp_path: Path) -> None:
    """However they are stored: the answers stay near those of the weights as they are."""
    folder = write_checkpoint(name, tmp_path / "plain")
    model = PagedModel(folder, quantization="fp8")
    mixtures = [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, MoE)]
    assert mixtures
    assert all(isinstance(each.experts, PackedMixture) and each.experts.bits == 8 for each in mixtures)
    plain = [layer.mlp for layer in PagedModel(folder).model.layers if isinstance(layer.mlp, MoE)]
    for ours, theirs in zip(mixtures, plain, strict=True):
        for packed, whole in (
            (ours.experts.gate_up, theirs.experts.gate_up),
            (ours.experts.down, theirs.experts.down),
        ):
            for expert, wanted in enumerate(whole):
                found = dequantise_packed_torch(packed.weight.of(expert))
                assert (found - wanted).norm() / wanted.norm() < 0.04


def in_fp8_by_channels(plain: Path) -> Path:
    """The same in fp8, the router left out by name; and `plain` with the numbers of that."""
    quantised = Path(shutil.copytree(plain, plain.parent / "quantised"))
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        scale = tensor.abs().amax(dim=1, keepdim=True) / 448.0
        stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = scale
        tensors[name] = stored[name].float() * scale
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    weights = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {**weights, "strategy": "token"}}
    config = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", "model.layers.0.mlp.gate"],
    }  # fmt: skip
    values = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    return quantised


def test_a_mixture_in_fp8_by_channels_is_taken_over(tmp_path: Path) -> None:
    """Weights and scales of the file, bit for bit; the router stays as it is."""
    plain = write_checkpoint("qwen3-moe-window", tmp_path / "plain")
    quantised = in_fp8_by_channels(plain)
    found = PagedModel(quantised).model.layers[1].mlp
    wanted = PagedModel(plain).model.layers[1].mlp
    assert isinstance(found, MoE)
    assert isinstance(wanted, MoE)
    assert isinstance(found.experts, PackedMixture)
    for expert in range(6):
        torch.testing.assert_close(
            dequantise_packed_torch(found.experts.down.weight.of(expert)), wanted.experts.down[expert]
        )


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("qwen3-moe", "w8a16, 32", "experts of 8 bits are not supported in groups of 32"),
        (
            "qwen3-moe",
            "gptq act-order",
            r"0\.mlp\.experts: experts in GPTQ int4, .* desc_act is true; use .* without act",
        ),
        (
            "mixtral",
            "gptq act-order",
            r"moe\.experts: experts in GPTQ int4, groups of 32 are not supported, because desc_act",
        ),
        ("qwen3-moe", "w4a16, act-order", "experts in pack-quantized int4, .* because actorder is not by weight; use"),
        ("qwen3-moe", "nvfp4", "experts in nvfp4 are not supported, because each matrix has a global scale; use"),
        ("mixtral", "nvfp4 of ModelOpt", "experts in nvfp4 of ModelOpt are not supported, because each matrix has a"),
    ],
)
def test_what_experts_cannot_be_is_refused_by_name_before_a_weight_is_read(
    family: str, name: str, message: str, tmp_path: Path
) -> None:
    folder = pair(tmp_path, family, *FORMATS[name])[1]
    with pytest.raises(ConfigError, match=message):
        outline_model(folder, read_model_config(folder), torch.float32)
    with pytest.raises(ConfigError, match=message):
        PagedModel(folder)


@pytest.mark.parametrize(
    "beside", [{"group_size": -1}, {"static_groups": True}, {"dynamic": {"-:.*experts": {}}, "group_size": 32}], ids=str
)
def test_an_order_of_the_quantising_alone_is_no_reason(beside: dict[str, Any], tmp_path: Path) -> None:
    """A scale an output, groups fixed beforehand, experts left out: their features lie as they did."""
    config, writer = FORMATS["gptq one group" if beside.get("group_size") == -1 else "gptq 64"]
    folder = pair(tmp_path, "qwen3-moe", {**config, "desc_act": True, **beside}, writer)[1]
    outline_model(folder, read_model_config(folder), torch.float32, complain=lambda fault: None)


@pytest.mark.parametrize("name", ["gpt-oss", "mixtral"])
def test_random_weights_have_the_formats_shape(name: str, tmp_path: Path) -> None:
    gpt_oss = write_checkpoint("gpt-oss-mxfp4", tmp_path / "oss" / "plain")
    folder = as_mxfp4(gpt_oss) if name == "gpt-oss" else pair(tmp_path, "mixtral", *FORMATS["w4a16, zeros"])[1]
    spec = read_model_config(folder)
    model = load_model(
        folder, spec, ops=resolve_ops("torch"), dtype=torch.float32, device=CPU, load_format="dummy", max_model_len=64
    )
    for layer in model.layers:
        assert isinstance(layer.mlp, MoE)
        assert isinstance(layer.mlp.experts, PackedMixture)
        values = layer.mlp.experts.gate_up.weight.values
        assert len(values.unique()) > 100
        assert layer.mlp.experts.down.weight.scales.float().isfinite().all()
