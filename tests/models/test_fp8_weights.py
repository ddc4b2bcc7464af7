"""fp8 weights against transformers with its projections made to round, and checkpoints that are fp8 already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers import fp8_linear
from cb_backend.layers.fp8_linear import Fp8Linear
from cb_backend.layers.mlp import MLP
from cb_backend.layers.ops import resolve_ops
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.registry import load_model, read_model_config
from tests.models.paged_model import CPU, PagedModel
from tests.models.tiny_checkpoints import load_reference, random_tokens, write_checkpoint

FP8 = torch.float8_e4m3fn
# Fused projections, rows in another order, norms around the products, factors, another activation
FAMILIES = ["phi3", "glm4", "gemma2", "gemma3", "olmo2", "granite", "exaone4"]
DYNAMIC_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
ARGUMENTS = {"num_bits": 8, "type": "float", "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**ARGUMENTS, "strategy": "channel", "dynamic": False},
            "input_activations": {**ARGUMENTS, "strategy": "token", "dynamic": True},
        }
    },
}


def rounded(rows: Tensor) -> Tensor:
    """Each row on the grid of fp8 whose largest number is the row's."""
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 448
    return (rows / scale).to(FP8).float() * scale


class RoundingLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = rounded(linear.weight.detach()), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(rounded(x), self.weight, self.bias)


@torch.inference_mode()
def reference(folder: Path, prompt: list[int]) -> Tensor:
    model = load_reference(folder)
    for layer in model.model.layers:  # type: ignore[union-attr]
        for block in (layer.self_attn, layer.mlp):  # type: ignore[union-attr]
            for name, module in list(block.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(block, name, RoundingLinear(module))
    logits: Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


def logits_of(folder: Path, prompt: list[int], chunk: int | None = None) -> Tensor:
    paged = PagedModel(folder, quantization="fp8")
    paged.start(0, len(prompt))
    return paged.prefill(0, prompt, chunk)


@pytest.mark.parametrize(
    "name", ["llama-gqa", "llama-biases", "llama-tied", "qwen2-bias", "qwen3", "mistral-window", *FAMILIES]
)
def test_logits_are_those_of_rounding_projections(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path)
    prompt = random_tokens(24, 1)
    wanted = reference(folder, prompt)
    for chunk in (None, 5):
        errors = (logits_of(folder, prompt, chunk) - wanted).abs()
        # A rounding error before fp8 is a step of fp8 after it: rarely.
        assert errors.median() < 1e-5
        assert errors.max() < 0.05 * wanted.abs().max()
    plain = PagedModel(folder)
    plain.start(0, len(prompt))
    assert (plain.prefill(0, prompt) - wanted).abs().median() > 1e-3  # the format is felt at all


def load(folder: Path, **options: Any) -> DecoderForCausalLM:
    config = read_model_config(folder)
    return load_model(folder, config, ops=resolve_ops("torch"), dtype=torch.bfloat16, device=CPU, **options)


def test_head_and_embedding_stay_as_they_are(tmp_path: Path) -> None:
    model = load(write_checkpoint("llama-tied", tmp_path), quantization="fp8")
    assert model.embed_tokens.weight.dtype == torch.bfloat16
    assert not model.has_own_head
    assert model.layers[0].self_attn.qkv_proj.weight.dtype == FP8


def test_matrices_are_quantised_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of a few rows: the same as at once, and never a whole matrix in another type."""
    folder = write_checkpoint("llama-gqa", tmp_path)
    whole = load(folder, quantization="fp8")
    seen = []
    quantise = fp8_linear.quantize_rows_torch

    def counted(rows: Tensor) -> Any:
        seen.append(rows.numel())
        return quantise(rows)

    monkeypatch.setattr(fp8_linear, "_ELEMENTS_AT_ONCE", 200)
    monkeypatch.setattr(fp8_linear, "quantize_rows_torch", counted)
    parts = load(folder, quantization="fp8")
    assert max(seen) <= 200
    for one, other in zip(whole.layers, parts.layers, strict=True):
        for a, b in ((one.mlp.down_proj, other.mlp.down_proj), (one.self_attn.qkv_proj, other.self_attn.qkv_proj)):
            assert isinstance(a, Fp8Linear)
            assert isinstance(b, Fp8Linear)
            assert torch.equal(a.weight.view(torch.uint8), b.weight.view(torch.uint8))
            assert torch.equal(a.weight_scales, b.weight_scales)


def test_dummy_weights_are_quantised_too(tmp_path: Path) -> None:
    model = load(write_checkpoint("llama-gqa", tmp_path), quantization="fp8", load_format="dummy", seed=3)
    projection = model.layers[1].mlp.gate_up_proj
    assert isinstance(projection, Fp8Linear)
    weight = projection.weight.float() * projection.weight_scales[:, None]
    assert 0.017 < weight.std() < 0.023
    assert (projection.weight.float().abs().amax(1) == 448).all()


def quantise_checkpoint(folder: Path, config: dict[str, Any], is_per_tensor: bool, scale_shape: str) -> Path:
    """Rewrite a checkpoint's projections as fp8 with their scales beside them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax() / 448 if is_per_tensor else weight.abs().amax(1, keepdim=True) / 448
        tensors[name] = (weight / scale).to(FP8)
        tensors[f"{name}_scale"] = scale if scale_shape == "as is" else scale.view(-1)
        if is_per_tensor:
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, config)
    return folder


def edit_config(folder: Path, quantization_config: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("config", [DYNAMIC_FP8, COMPRESSED], ids=["fp8", "compressed-tensors"])
@pytest.mark.parametrize("scale_shape", ["as is", "flat"])
def test_an_fp8_checkpoint_is_taken_over(config: dict[str, Any], scale_shape: str, tmp_path: Path) -> None:
    """With a scale a channel it is what quantising at start-up gives, to the bit; and it needs no setting."""
    folder = write_checkpoint("qwen3", tmp_path)
    prompt = random_tokens(20, 4)
    wanted = logits_of(folder, prompt)
    quantise_checkpoint(folder, config, is_per_tensor=False, scale_shape=scale_shape)
    paged = PagedModel(folder)
    paged.start(0, len(prompt))
    assert torch.equal(paged.prefill(0, prompt), wanted)
    assert paged.config.quantization == "fp8"


@pytest.mark.parametrize("name", ["phi3", "glm4"])
@pytest.mark.parametrize("is_per_tensor", [False, True])
def test_an_fp8_checkpoint_of_fused_and_reordered_rows(name: str, is_per_tensor: bool, tmp_path: Path) -> None:
    """Scales follow their rows: the weights mean what the unquantised checkpoint's would, rounded."""
    folder = write_checkpoint(name, tmp_path)
    exact = load(folder)
    model = load(quantise_checkpoint(folder, DYNAMIC_FP8, is_per_tensor, "as is"))
    for layer, exact_layer in zip(model.layers, exact.layers, strict=True):
        attention, wanted_attention = layer.self_attn, exact_layer.self_attn
        pairs = [(attention.qkv_proj, wanted_attention.qkv_proj), (attention.o_proj, wanted_attention.o_proj)]
        mlp, wanted_mlp = layer.mlp, exact_layer.mlp
        assert isinstance(mlp, MLP)
        assert isinstance(wanted_mlp, MLP)
        pairs += [(mlp.gate_up_proj, wanted_mlp.gate_up_proj), (mlp.down_proj, wanted_mlp.down_proj)]
        for found, wanted in pairs:
            assert isinstance(found, Fp8Linear)
            weight = found.weight.float() * found.weight_scales[:, None]
            assert (weight - wanted.weight.float()).abs().max() < 0.07 * wanted.weight.float().abs().max()
            assert (weight - wanted.weight.float()).abs().max() > 0


@pytest.mark.parametrize("scale_shape", ["as is", "flat"])
def test_an_fp8_checkpoint_with_a_scale_a_matrix(scale_shape: str, tmp_path: Path) -> None:
    folder = quantise_checkpoint(write_checkpoint("llama-gqa", tmp_path), DYNAMIC_FP8, True, scale_shape)
    tensors = load_file(folder / "model.safetensors")
    projection = load(folder).layers[0].self_attn.qkv_proj
    assert isinstance(projection, Fp8Linear)
    parts = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    wanted = torch.cat([tensors[name].float() * tensors[f"{name}_scale"] for name in parts])
    assert torch.equal(projection.weight.float() * projection.weight_scales[:, None], wanted)


def edited(groups: dict[str, Any]) -> dict[str, Any]:
    return {**COMPRESSED, "config_groups": {"group_0": {**COMPRESSED["config_groups"]["group_0"], **groups}}}  # type: ignore[index]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"quantised \(bitsandbytes\); supported are float32"),
        ({"bits": 4}, r"quantised \(unknown\)"),
        ({"bits": 4, "group_size": 64}, r"quantised \(MLX's way\)"),
        ("fp8", "must be an object, found 'fp8'"),
        ({**DYNAMIC_FP8, "weight_block_size": [64, 64]}, r"\(fp8\) with a scale a block of \[64, 64\] weights"),
        ({**DYNAMIC_FP8, "fmt": "e5m2"}, r"numbers of the format 'e5m2'"),
        ({**COMPRESSED, "config_groups": {}}, "no groups of layers"),
        ({**COMPRESSED, "config_groups": None}, "no groups of layers"),
        (edited({"weights": {**ARGUMENTS, "num_bits": 4, "type": "int"}}), "4-bit int weights"),
        (edited({"weights": {**ARGUMENTS, "strategy": "block"}}), "a scale a block"),
        (edited({"weights": None}), "a group of layers"),
        (edited({"targets": ["re:.*mlp.*"]}), "something else than all linear layers"),
        (edited({"input_activations": None}), "fp8 weights whose inputs stay in 16 bits"),
        (
            edited({"input_activations": {**ARGUMENTS, "type": "int"}}),
            "fp8 weights whose inputs are to be 8-bit int",
        ),
    ],
)
def test_other_quantisation_is_refused_by_name(config: Any, message: str, tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    edit_config(folder, config)
    with pytest.raises(ConfigError, match=message):
        read_model_config(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.0.mlp.up_proj.weight_scale", None, r"up_proj\.weight is F8_E4M3 but there is no .*weight_scale"),
        ("model.layers.0.mlp.up_proj.weight_scale", torch.ones(3), r"has shape \[3\]; supported are one scale"),
        ("lm_head.weight", torch.ones(97, 48).to(FP8), r"lm_head\.weight is F8_E4M3; embedding, head and norms"),
        ("model.layers.0.mlp.up_proj.zeros", torch.ones(1), r"up_proj\.zeros has no place"),
    ],
)
def test_a_broken_fp8_checkpoint_is_named(name: str, tensor: Tensor | None, message: str, tmp_path: Path) -> None:
    folder = quantise_checkpoint(write_checkpoint("llama-gqa", tmp_path), DYNAMIC_FP8, False, "flat")
    tensors = load_file(folder / "model.safetensors")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_weights_that_are_not_finite_cannot_be_quantised(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight holds numbers that are not finite"):
        load(folder, quantization="fp8")


def test_fp8_without_a_word_of_it_in_the_config_is_refused(tmp_path: Path) -> None:
    folder = quantise_checkpoint(write_checkpoint("llama-gqa", tmp_path), None, False, "flat")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"is F8_E4M3; the checkpoint is quantised, but config\.json does not say how"
    ):
        load(folder)
