"""fp8 checkpoints as makers and others publish them: modules that are left out, scales by other names, a file apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.fp8_linear import Fp8Linear
from cb_backend.models.registry import read_model_config
from tests.models.paged_model import PagedModel
from tests.models.test_fp8_weights import (
    COMPRESSED,
    DYNAMIC_FP8,
    RoundingLinear,
    edit_config,
    load,
    quantise_checkpoint,
    rounded,
)
from tests.models.test_text_parts import FILE, PROMPT, logits_of, write
from tests.models.tiny_checkpoints import load_reference, random_tokens, write_checkpoint

# As Ministral 3 and Devstral 2 came from their maker
STATIC = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "dequantize": False,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    "weight_block_size": None,
}
OF_MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}


class RoundedInputs(nn.Module):
    """What a projection with weights of a given grid computes from inputs that are rounded."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(rounded(x), self.weight)


def close(found: Tensor, wanted: Tensor) -> bool:
    """A rounding error before fp8 is a step of fp8 after it: rarely."""
    errors = (found - wanted).abs()
    return bool(errors.median() < 1e-5 and errors.max() < 0.05 * wanted.abs().max())


def quantise_text(folder: Path, is_per_tensor: bool) -> dict[str, Tensor]:
    """The projections of a checkpoint of text and pictures in fp8, those of the pictures as they are. Returns what the
    new weights stand for.
    """
    tensors, meant = load_file(folder / FILE), {}
    for name in [name for name in tensors if name.endswith("proj.weight") and "vision" not in name]:
        weight, module = tensors[name].float(), name.removesuffix("weight")
        scale = weight.abs().amax() / 448 if is_per_tensor else weight.abs().amax(1, keepdim=True) / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        meant[name] = tensors[name].float() * scale
        if is_per_tensor:
            tensors |= {f"{name}_scale_inv": scale, f"{module}activation_scale": torch.tensor(0.1)}
        else:
            tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / FILE, {"format": "pt"})
    return meant


@torch.inference_mode()
def test_ministral_3_as_its_maker_publishes_it(tmp_path: Path) -> None:
    model = write("mistral3", tmp_path)
    meant = quantise_text(tmp_path, is_per_tensor=True)
    edit_config(tmp_path, STATIC)
    for name, weight in meant.items():
        layer, block, part = name.split("layers.")[1].removesuffix(".weight").split(".")
        text: Any = model.model.language_model  # type: ignore[union-attr]
        setattr(getattr(text.layers[int(layer)], block), part, RoundedInputs(weight))
    wanted = model(input_ids=torch.tensor([PROMPT])).logits[0]
    assert read_model_config(tmp_path).quantization == "fp8"
    assert close(logits_of(tmp_path), wanted)


@pytest.mark.parametrize("head", ["lm_head", "re:.*lm_head", "language_model.lm_head"])
def test_gemma_3_of_text_and_pictures_by_compressed_tensors(head: str, tmp_path: Path) -> None:
    write("gemma3", tmp_path)
    paged = PagedModel(tmp_path, quantization="fp8")
    paged.start(0, len(PROMPT))
    wanted = paged.prefill(0, PROMPT, 11)
    quantise_text(tmp_path, is_per_tensor=False)
    edit_config(tmp_path, {**COMPRESSED, "ignore": [head, "re:vision_tower.*", "re:multi_modal_projector.*"]})
    assert torch.equal(logits_of(tmp_path), wanted)


LEFT_OUT: list[tuple[dict[str, Any], str]] = [
    ({**DYNAMIC_FP8, "ignored_layers": ["lm_head", "model.layers.0.mlp.down_proj"]}, "model.layers.0.mlp.down_proj"),
    ({**DYNAMIC_FP8, "modules_to_not_convert": ["o_proj"]}, "o_proj"),
    ({**DYNAMIC_FP8, "modules_to_not_convert": ["model.layers.1"]}, "model.layers.1."),
    ({**COMPRESSED, "ignore": ["lm_head", "model.layers.1.self_attn.o_proj"]}, "model.layers.1.self_attn.o_proj"),
    ({**COMPRESSED, "ignore": ["lm_head", "re:.*self_attn"]}, "self_attn"),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.0*"]}, "model.layers.0."),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*mlp*"]}, "mlp"),
]


@pytest.mark.parametrize(("config", "kept"), LEFT_OUT, ids=[kept for _, kept in LEFT_OUT])
@torch.inference_mode()
def test_modules_that_are_left_out_stay_as_they_are(config: dict[str, Any], kept: str, tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    prompt = random_tokens(24, 1)
    reference: Any = load_reference(folder)
    plain = load_file(folder / FILE)
    quantise_checkpoint(folder, config, is_per_tensor=False, scale_shape="as is")
    tensors = load_file(folder / FILE)
    for name in [name for name in tensors if kept in name]:
        tensors.pop(name)
        tensors |= {name: plain[name]} if name in plain else {}
    save_file(tensors, folder / FILE, {"format": "pt"})
    for index, layer in enumerate(reference.model.layers):
        for block in ("self_attn", "mlp"):
            for part, module in list(getattr(layer, block).named_children()):
                if isinstance(module, nn.Linear) and kept not in f"model.layers.{index}.{block}.{part}.weight":
                    setattr(getattr(layer, block), part, RoundingLinear(module))
    paged = PagedModel(folder)
    paged.start(0, len(prompt))
    assert close(paged.prefill(0, prompt, 7), reference(torch.tensor([prompt])).logits[0])
    layers = load(folder).layers
    kinds = {isinstance(layer.self_attn.o_proj, Fp8Linear) for layer in layers}
    kinds |= {isinstance(layer.mlp.down_proj, Fp8Linear) for layer in layers}  # type: ignore[union-attr]
    assert kinds == {True, False}, "some are fp8, some are not"


def test_a_part_that_is_left_out_of_a_fused_projection_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    config = {**COMPRESSED, "ignore": ["lm_head", "re:.*q_proj"]}
    quantise_checkpoint(folder, config, is_per_tensor=False, scale_shape="as is")
    with pytest.raises(ConfigError, match=r"self_attn\.q_proj is plain, .*k_proj is fp8.*: supported is one format"):
        load(folder)


def test_a_module_that_is_left_out_and_fp8_all_the_same_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    config = {**COMPRESSED, "ignore": ["lm_head", "re:.*down_proj"]}
    quantise_checkpoint(folder, config, is_per_tensor=False, scale_shape="as is")
    with pytest.raises(ConfigError, match=r"down_proj\.weight is F8_E4M3; .* and what quantization_config leaves out"):
        load(folder)


@pytest.mark.parametrize("is_apart", [True, False])
def test_modelopts_settings_in_a_file_apart_or_one_level_down(is_apart: bool, tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3", tmp_path)
    quantise_checkpoint(folder, DYNAMIC_FP8, is_per_tensor=True, scale_shape="as is")
    wanted = logits_of(folder)
    told = {"producer": {"name": "modelopt"}, "quantization": {**OF_MODELOPT, "exclude_modules": ["lm_head"]}}
    edit_config(folder, None if is_apart else {"quant_method": "modelopt", **told})
    if is_apart:
        (folder / "hf_quant_config.json").write_text(json.dumps(told))
    assert torch.equal(logits_of(folder), wanted)


def test_a_file_apart_says_what_is_not_done(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3", tmp_path)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ConfigError, match=r"quantised \(modelopt\) with quant_algo 'W4A8_AWQ'"):
        read_model_config(folder)


@pytest.mark.parametrize(
    "told", [{"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, {"quant_algo": None}]
)
def test_a_file_apart_about_the_cache_alone_leaves_weights_as_they_are(told: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3", tmp_path)
    wanted = logits_of(folder)
    (folder / "hf_quant_config.json").write_text(json.dumps(told))
    assert read_model_config(folder).quantization is None
    assert torch.equal(logits_of(folder), wanted)


@pytest.mark.parametrize("key", ["quantization", "compression_config"])
def test_a_word_where_some_writers_have_an_object_means_nothing(key: str, tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3", tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, key: "none"}))
    assert read_model_config(folder).quantization is None


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-bias", "gemma3", "ministral3"])
def test_models_whose_tokens_see_all_others_are_refused(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "is_causal": False}))
    with pytest.raises(
        ConfigError, match="is_causal is false; supported are models whose tokens see earlier ones only"
    ):
        read_model_config(folder)
