"""Models with packed weights against the same weights written out: every format, through the readers and the layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.registry import read_model_config
from tests.models import quantised_writers as writers
from tests.models.paged_model import PagedModel
from tests.models.quantised_checkpoints import Writer, write_pair
from tests.models.tiny_checkpoints import random_tokens

SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "head_dim": 32, "max_position_embeddings": 128,
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": False}


def compressed(weights: dict[str, Any], **given: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **given,
    }  # fmt: skip


def pack_quantized(bits: int, group: int, **given: Any) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    weights = {"type": "int", "num_bits": bits, "symmetric": True, **strategy, **given}
    return compressed(weights, format="pack-quantized")


def of_group(write: Callable[..., writers.Written], group: int, **given: Any) -> Writer:
    return lambda out_size, in_size, seed: write(out_size, in_size, group, seed=seed, **given)


def whole(write: Callable[..., writers.Written], **given: Any) -> Writer:
    return lambda out_size, in_size, seed: write(out_size, in_size, seed=seed, **given)


gptq, pack = writers.write_gptq, writers.write_pack_quantized
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "awq 64": ({**AWQ, "group_size": 64}, of_group(writers.write_awq, 64)),
    "awq 32, bf16 scales": ({**AWQ, "group_size": 32}, of_group(writers.write_awq, 32, dtype=torch.bfloat16)),
    "gptq 64": ({**GPTQ, "group_size": 64}, of_group(gptq, 64)),
    "gptq v2": ({**GPTQ, "group_size": 32, "checkpoint_format": "gptq_v2"}, of_group(gptq, 32, is_v2=True)),
    "gptq symmetric": ({**GPTQ, "group_size": 64, "sym": True}, of_group(gptq, 64, is_symmetric=True)),
    "gptq act-order": ({**GPTQ, "group_size": 32, "desc_act": True}, of_group(gptq, 32, is_act_order=True)),
    "gptq one group": ({**GPTQ, "group_size": -1}, of_group(gptq, -1)),
    "gptq 8 bits": ({**GPTQ, "bits": 8, "group_size": 64}, of_group(gptq, 64, bits=8)),
    "w4a16": (pack_quantized(4, 64), of_group(pack, 64)),
    "w4a16, zeros": (pack_quantized(4, 32, symmetric=False), of_group(pack, 32, has_zeros=True)),
    "w4a16, act-order": (pack_quantized(4, 32, actorder="group"), of_group(pack, 32, is_act_order=True)),
    "w4a16, channel": (pack_quantized(4, -1), of_group(pack, -1)),
    "w8a16": (pack_quantized(8, 64), of_group(pack, 64, bits=8)),
    "w8a16, channel": (pack_quantized(8, -1), of_group(pack, -1, bits=8)),
    "w8a8": (
        compressed({"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True}, format="int-quantized"),
        whole(writers.write_int_quantized),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        whole(writers.write_fp8_blocks),
    ),
    "fp8 blocks, bf16 scales": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        whole(writers.write_fp8_blocks, dtype=torch.bfloat16),
    ),
    "nvfp4": (
        compressed(
            {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
            format="nvfp4-pack-quantized",
        ),
        whole(writers.write_nvfp4),
    ),
    "nvfp4 of ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        whole(writers.write_nvfp4, is_modelopt=True),
    ),
}  # fmt: skip
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama, biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {}),
}


def pair(folder: Path, family: str, config: dict[str, Any], writer: Writer, **kept: Any) -> tuple[Path, Path]:
    from transformers import AutoModelForCausalLM

    plain, quantised = folder / "plain", folder / "quantised"
    quantised.mkdir()
    config_class, options = FAMILIES[family]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(plain)
    write_pair(plain, quantised, config, writer, **kept)
    return plain, quantised


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    """Of a prompt in chunks beside another one, then of single tokens of both."""
    model = PagedModel(folder)
    prompts = [random_tokens(21, 1), random_tokens(9, 2)]
    found = [model.step([], [(0, prompts[0][:8]), (1, prompts[1])]), model.step([], [(0, prompts[0][8:])])]
    found += [model.step([(0, token), (1, token + 1)], []) for token in (5, 60, 17)]
    return torch.cat(found)


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_model_is_the_model_of_its_numbers(name: str, tmp_path: Path) -> None:
    config, writer = FORMATS[name]
    plain, quantised = pair(tmp_path, "llama", config, writer)
    wanted = logits(plain)
    assert wanted.std() > 0.05, "weights that matter"
    torch.testing.assert_close(logits(quantised), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["awq 64", "gptq act-order", "fp8 blocks", "nvfp4"])
def test_families(family: str, name: str, tmp_path: Path) -> None:
    config, writer = FORMATS[name]
    plain, quantised = pair(tmp_path, family, config, writer)
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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**AWQ, "group_size": 64, "version": "gemv"}, "awq\\) with version 'gemv'"),
    ({**AWQ, "bits": 3, "group_size": 64}, "bits 3"),
    ({**AWQ, "group_size": 100}, "group_size 100"),
    ({**GPTQ, "bits": 2, "group_size": 64}, "bits 2"),
    ({**GPTQ, "bits": 8, "group_size": 32}, "8 bits in groups of 32"),
    ({**GPTQ, "group_size": 64, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ({**GPTQ, "group_size": 64, "lm_head": True}, "a quantised lm_head"),
    ({**pack_quantized(4, 64), "format": "marlin-24"}, "format 'marlin-24'"),
    (compressed({"type": "int", "num_bits": 3, "strategy": "group"}), "3-bit int weights"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"a scale a block of \[64, 64\]"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"quantised \(bitsandbytes\); supported are"),
    ({**GPTQ, "group_size": 64, "dynamic": [1]}, r"dynamic \[1\]"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "reason"), REFUSED)
def test_what_is_not_done_is_refused_by_name(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    LlamaConfig(**SIZES, quantization_config=config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        read_model_config(tmp_path)


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
