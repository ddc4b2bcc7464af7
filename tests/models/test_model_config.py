"""What is read from `config.json`, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.registry import read_model_config, resolve_dtype
from tests.models.tiny_checkpoints import TEXT_FAMILIES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def write(folder: Path, values: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("model_type", TEXT_FAMILIES)
def test_absent_keys_get_the_defaults_of_transformers(tmp_path: Path, model_type: str) -> None:
    # A multiple of every family's default number of KV heads, and heads of which parts can be turned.
    heads = {"num_attention_heads": 32, "hidden_size": 256}
    config = read_model_config(write(tmp_path, {**LLAMA, **heads, "model_type": model_type}))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert config.norm.eps == theirs.rms_norm_eps
    ropes = theirs.rope_parameters
    theta = ropes["rope_theta"] if "rope_theta" in ropes else ropes[theirs.layer_types[0]]["rope_theta"]
    assert config.ropes[0].theta == theta
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.windows == tuple(theirs_window(theirs, index) for index in range(3))


def theirs_window(theirs: Any, index: int) -> int:
    kinds = getattr(theirs, "layer_types", None)
    is_sliding = kinds is None or kinds[index] == "sliding_attention"
    return (getattr(theirs, "sliding_window", None) or 0) if is_sliding else 0


def test_mistral_with_layer_types_is_ministral(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    values = {**LLAMA, "num_key_value_heads": 2, "layer_types": kinds, "sliding_window": 7}
    mistral, ministral = (
        read_model_config(write(tmp_path, {**values, "model_type": name})) for name in ("mistral", "ministral")
    )
    assert mistral.windows == (0, 7, 0)
    assert mistral == dataclasses.replace(ministral, model_type="mistral")


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1},
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ],
)
def test_windows_per_layer(tmp_path: Path, model_type: str, options: dict[str, Any]) -> None:
    config = read_model_config(
        write(tmp_path, {**LLAMA, "num_key_value_heads": 2, "model_type": model_type, **options})
    )
    theirs = AutoConfig.from_pretrained(tmp_path)
    expected = [(theirs.sliding_window or 0) if kind == "sliding_attention" else 0 for kind in theirs.layer_types]
    assert config.windows == tuple(expected)


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 4},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ],
)
def test_both_spellings_of_rope_mean_the_same(tmp_path: Path, scaling: dict[str, Any]) -> None:
    old = read_model_config(write(tmp_path, {**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})).ropes[0]
    new = read_model_config(write(tmp_path, {**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}})).ropes[0]
    assert old == new
    assert (old.rope_type, old.theta, old.factor) == (
        scaling.get("type") or scaling["rope_type"],
        5e5,
        scaling["factor"],
    )


def test_original_length_beside_the_rope_parameters_wins(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    values = {**LLAMA, "original_max_position_embeddings": 64, "rope_scaling": {"type": "longrope", **factors}}
    rope = read_model_config(write(tmp_path, values)).ropes[0]
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.standardize_rope_params()  # transformers does so before it computes frequencies
    assert rope.original_max_position_embeddings == theirs.rope_parameters["original_max_position_embeddings"] == 64
    assert rope.factor == 512 / 64


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 512),
        ({"type": "linear", "factor": 2.0}, 1024),
        ({"type": "dynamic", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_max_context_len(tmp_path: Path, scaling: dict[str, Any] | None, length: int) -> None:
    assert read_model_config(write(tmp_path, {**LLAMA, "rope_scaling": scaling})).max_context_len == length


@pytest.mark.parametrize(
    ("config_ids", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (None, None, ()),
        (2, {"eos_token_id": [7, 2]}, (7, 2)),
        (2, {"temperature": 0.6}, (2,)),
    ],
)
def test_end_of_sequence_ids(tmp_path: Path, config_ids: Any, generation: Any, expected: tuple[int, ...]) -> None:
    write(tmp_path, {**LLAMA, "eos_token_id": config_ids}, generation)
    assert read_model_config(tmp_path).eos_token_ids == expected


def test_dtype(tmp_path: Path) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for spelling in ("dtype", "torch_dtype"):
        config = read_model_config(write(tmp_path, {**LLAMA, spelling: "bfloat16"}))
        assert resolve_dtype("auto", config, gpu) == torch.bfloat16
        assert resolve_dtype("auto", config, cpu) == torch.float32
        assert resolve_dtype("float16", config, cpu) == torch.float16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba"},
            r"'mamba' is not supported; supported: .*llama, ministral, .*mistral, .*qwen2, .*qwen3",
        ),
        ({"hidden_size": None}, r"does not set 'hidden_size'"),
        ({"hidden_size": "64"}, r"'hidden_size' must be of type int, found '64'"),
        ({"vocab_size": 0}, r"'vocab_size' is 0; it must be at least 1"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 15}, r"head_dim is 15"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'; supported: silu"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"quantised \(bitsandbytes\); supported are"),
        ({"dtype": "float8_e4m3fn"}, r"dtype is 'float8_e4m3fn'; supported: float32, float16, bfloat16"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, r"rope_type 'su'; supported .* default, linear, dynamic"),
        ({"rope_scaling": {"type": "linear"}}, r"does not set 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"a rope for each layer type"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            r"short_factor has 1 entries; head_dim 16 needs 8",
        ),
        ({"rms_norm_eps": float("nan")}, r"'rms_norm_eps' is nan; it must be a finite number"),
        ({"num_hidden_layers": 10**9}, r"'num_hidden_layers' is 1000000000; it must be at least 1 and at most 10000"),
        ({"rope_theta": 0}, r"'rope_theta' is 0.0; it must be above 0"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, r"'factor' is -1.0; it must be above 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0}}, r"'factor' is 0.0; it must be above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.0}}, r"'factor' is 0.0; it must be above 0"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 0.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
            r"'factor' is 0.0; it must be above 0",
        ),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5"),
        ({"eos_token_id": "</s>"}, r"'eos_token_id' must be a token id or a list of them, found '</s>'"),
        ({"model_type": "qwen3", "num_key_value_heads": 2, "layer_types": ["full_attention"]}, r"found 1 entries"),
        (
            {"model_type": "qwen2", "num_key_value_heads": 2, "layer_types": ["linear_attention"] * 3},
            r"3 entries with linear_attention",
        ),
        (
            {"model_type": "mistral", "num_key_value_heads": 2, "layer_types": ["full_attention", 7, "full_attention"]},
            r"3 entries with 7",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, r"no_rope_layers must hold .* 3 layers; found 2 entries"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, "x"]}, r"no_rope_layers must hold .* \[1, 0, 'x'\]"),
        ({"model_type": "granite", "logits_scaling": 0.0}, r"'logits_scaling' is 0.0; it must be above 0"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "linear"}},
            r"rope_type 'linear'; phi3 has default and longrope",
        ),
        (
            {"model_type": "phi3", "partial_rotary_factor": 0.1},
            r"partial_rotary_factor is 0.1, by which 1 of a head's 16",
        ),
        ({"model_type": "olmo2", "partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5"),
        (
            {"model_type": "exaone4", "num_key_value_heads": 2, "sliding_window_pattern": "LLG"},
            r"sliding_window_pattern is 'LLG' and there are no layer_types",
        ),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model_config(write(tmp_path, {**LLAMA, **changes}))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object, found list")]
)
def test_broken_config_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"config.json {message}"):
        read_model_config(tmp_path)


def test_missing_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_model_config(tmp_path)
