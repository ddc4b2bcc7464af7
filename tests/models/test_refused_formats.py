"""Quantised checkpoints that are not served: each is refused by the name of what it asks for, none loads as plain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationMethod

from cb_backend.contracts.errors import ConfigError
from cb_backend.models import quantization
from cb_backend.models.registry import read_model_config
from tests.models.quantised_models import AWQ, GPTQ, SIZES, compressed, pack_quantized

AWQ_VERSIONS = ("gemv", "gemv_fast", "marlin", "exllama", "llm-awq", "GEMV")
MXFP4 = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32}
# A rotation of weights alone, and one whose other half is of what the layers are given
TURNED = {
    "config_groups": {
        "R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_output"}]},
        "R4": {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj"], "location": "input"}]},
    }
}
FP8_GROUP = {
    "targets": ["re:.*self_attn.*"],
    "format": "float-quantized",
    "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
    "input_activations": {"type": "float", "num_bits": 8, "strategy": "token"},
}


def beside(group: dict[str, Any], **given: Any) -> dict[str, Any]:
    """A configuration of four bits with another group of modules."""
    config = pack_quantized(4, 64)
    return {**config, **given, "config_groups": {**config["config_groups"], "group_1": group}}


# Methods that have been asked for elsewhere and must not slip through.
NEVER = {
    "bitsandbytes", "hqq", "quanto", "torchao", "eetq", "fbgemm_fp8", "higgs", "spqr", "vptq", "aqlm", "bitnet",
    "quark", "fp_quant", "auto-round", "sinq", "mxfp8",
}  # fmt: skip
METHODS = {str(method.value) for method in QuantizationMethod} | set(AUTO_QUANTIZATION_CONFIG_MAPPING)

REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({**AWQ, "group_size": 64, "version": name}, rf"awq\) with version '{name}'") for name in AWQ_VERSIONS),
    ({**AWQ, "group_size": 64, "version": None, "format": "gemv_fast"}, "format 'gemv_fast'"),
    ({**AWQ, "group_size": 64, "zero_point": False}, "zero_point False"),
    ({**AWQ, "bits": 3, "group_size": 64}, "bits 3"),
    ({**AWQ, "group_size": 100}, "group_size 100"),
    ({**GPTQ, "bits": 2, "group_size": 64}, "bits 2"),
    ({**GPTQ, "group_size": 16}, "group_size 16"),
    ({**GPTQ, "group_size": 64, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ({**GPTQ, "group_size": 64, "format": "gptq_p"}, "format 'gptq_p'"),
    ({**GPTQ, "group_size": 64, "pack_dtype": "int16"}, "pack_dtype 'int16'"),
    ({**GPTQ, "group_size": 64, "is_marlin_format": True}, "is_marlin_format true"),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, r"quantised \(bitsandbytes\)"),
    ({"group_size": 64, "bits": 4}, r"quantised \(MLX's way\)"),
    ({**pack_quantized(4, 64), "sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitmask'"),
    ({**pack_quantized(4, 64), "transform_config": TURNED}, "turns what layers are given, at 'input'"),
    (compressed({"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [1, 64]}), r"\[1, 64\]"),
    ({**pack_quantized(4, 64), "format": "marlin-24"}, "format 'marlin-24'"),
    ({**pack_quantized(4, 64), "format": "dense"}, "format 'dense'"),
    ({**pack_quantized(4, 64), "config_groups": {}}, "no groups of layers"),
    ({**pack_quantized(4, 64), "config_groups": {"group_0": "W4A16"}}, "a group of layers 'W4A16'"),
    (compressed({"type": "int", "num_bits": 3, "strategy": "group"}), "3-bit int weights"),
    (compressed({"type": "int", "num_bits": 4, "strategy": "tensor"}, format="pack-quantized"), "a scale a tensor"),
    (compressed({**MXFP4, "group_size": 16}, format="mxfp4-pack-quantized"), "groups of 16"),
    (compressed({**MXFP4, "symmetric": False}, format="mxfp4-pack-quantized"), "not symmetric"),
    (compressed({**MXFP4, "num_bits": 6}, format="mxfp6-packed"), "6-bit float weights"),
    (compressed({**MXFP4, "num_bits": 8}, format="mxfp8-quantized"), "a scale a group"),
    (beside(FP8_GROUP), "fp8 groups beside other groups"),
    (beside({**FP8_GROUP, "input_activations": None}), "fp8 groups beside other groups"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"a scale a block of \[64, 64\]"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"quantised \(bitsandbytes\); supported are"),
    ({**GPTQ, "group_size": 64, "dynamic": [1]}, r"dynamic \[1\]"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "reason"), REFUSED)
def test_what_is_not_done_is_refused_by_name(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_config(tmp_path, config)
    with pytest.raises(ConfigError, match=reason):
        read_model_config(tmp_path)


def write_config(folder: Path, quantization_config: Any) -> None:
    LlamaConfig(**SIZES).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": quantization_config}))


@pytest.mark.parametrize(
    "beside",
    [
        {"transform_config": {"config_groups": {"R1": TURNED["config_groups"]["R1"]}}},
        {"transform_config": {}},
        {"sparsity_config": {"format": "dense"}},
        {"sparsity_config": None},
    ],
)
def test_what_changes_nothing_is_no_reason(beside: dict[str, Any], tmp_path: Path) -> None:
    write_config(tmp_path, {**pack_quantized(4, 64), **beside})
    assert read_model_config(tmp_path).quantization == "compressed-tensors"


@pytest.mark.parametrize(("key", "method"), [("quantization", "MLX's way"), ("compression_config", "unknown")])
def test_other_places_of_a_configuration_are_looked_at(key: str, method: str, tmp_path: Path) -> None:
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    given = {"group_size": 64, "bits": 4} if key == "quantization" else {"version": "0.6"}
    (tmp_path / "config.json").write_text(json.dumps({**values, key: given}))
    with pytest.raises(ConfigError, match=rf"quantised \({method}\)"):
        read_model_config(tmp_path)


def test_methods_that_are_never_served_are_known_to_nobody_here() -> None:
    assert NEVER <= METHODS, "names that transformers does not know"
    assert not NEVER & set(quantization.METHODS)


@pytest.mark.parametrize("method", sorted(METHODS - set(quantization.METHODS)))
def test_every_other_method_of_transformers_is_refused_by_name(method: str, tmp_path: Path) -> None:
    write_config(tmp_path, {"quant_method": method, "bits": 4, "weight_block_size": [128, 128]})
    with pytest.raises(ConfigError) as caught:
        read_model_config(tmp_path)
    assert f"the checkpoint is quantised ({method})" in str(caught.value)
    assert "supported are" in str(caught.value), "what there is instead"
    assert "Use another quantisation of the model" in str(caught.value), "what to do"


@pytest.mark.parametrize(
    "config",
    [{"bits": 4, "group_size": 128}, {"quant_method": None}, {"quant_method": ["awq"]}, {"quant_method": "Q4"}],
)
def test_a_method_that_nobody_knows_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    write_config(tmp_path, config)
    with pytest.raises(ConfigError, match=r"the checkpoint is quantised \("):
        read_model_config(tmp_path)


@pytest.mark.parametrize("config", [["awq"], "awq", 4])
def test_a_configuration_that_is_no_object_is_refused(config: Any, tmp_path: Path) -> None:
    write_config(tmp_path, config)
    with pytest.raises(ConfigError, match="'quantization_config' must be an object"):
        read_model_config(tmp_path)
