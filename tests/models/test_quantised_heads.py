"""Heads of few bits, groups of modules with formats of their own, and heads that are plain whatever the others are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cb_backend.contracts.errors import ConfigError
from tests.models import quantised_writers as writers
from tests.models.paged_model import PagedModel
from tests.models.quantised_models import (
    FORMATS,
    GPTQ,
    SIZES,
    compressed,
    gptq,
    logits,
    pack,
    pack_quantized,
    pair,
)

VOCAB_SIZE = 104  # whole words of eight columns, and no whole tile
INT8 = {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True}
HEADS: dict[str, dict[str, Any]] = {
    "gptq 64": {"lm_head": True},
    "gptq v2": {"lm_head": True},
    "gptq act-order": {"lm_head": True},
    "gptq 8 bits": {"lm_head": True},
    "w4a16": {"ignore": []},
    "w4a16, zeros": {"ignore": []},
    "w8a16, channel": {"ignore": ["re:.*embed.*"]},
    "w8a8": {"ignore": []},
    "nvfp4": {"ignore": []},
    "mxfp4": {"ignore": []},
    "nvfp4 of ModelOpt": {"ignore": []},
}


def assert_same(plain: Path, quantised: Path) -> None:
    torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_few_bits_is_the_head_of_its_numbers(name: str, tmp_path: Path) -> None:
    config, writer = FORMATS[name]
    plain, quantised = pair(tmp_path, "llama", {**config, **HEADS[name]}, writer, vocab_size=VOCAB_SIZE, has_head=True)
    assert_same(plain, quantised)


@pytest.mark.parametrize("name", ["gptq 64", "w4a16", "mxfp4"])
def test_a_tied_model_may_have_a_head_of_few_bits(name: str, tmp_path: Path) -> None:
    """The embedding stays as it is; the head's numbers are others, so it is not the embedding's."""
    config, writer = FORMATS[name]
    plain, quantised = pair(tmp_path, "qwen2", {**config, **HEADS[name]}, writer, vocab_size=VOCAB_SIZE, has_head=True)
    assert PagedModel(quantised).model.has_own_head
    assert_same(plain, quantised)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("awq 64", {}),  # such checkpoints never say that it is left out
        ("gptq 64", {"lm_head": False}),
        ("fp8 blocks", {}),
        ("w4a16", {"ignore": []}),  # said of all linear layers, and the file has the head as it is
        ("nvfp4 of ModelOpt", {"ignore": []}),
        ("w8a8", {"ignore": []}),
    ],
)
def test_a_head_that_is_as_it_is_in_the_file_stays_so(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config, writer = FORMATS[name]
    plain, quantised = pair(tmp_path, "llama", {**config, **changes}, writer)
    assert_same(plain, quantised)


@pytest.mark.parametrize("name", ["gptq 64", "w4a16"])
def test_a_lack_of_a_heads_tensors_is_named(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    config, writer = FORMATS[name]
    _, quantised = pair(tmp_path, "llama", {**config, **HEADS[name]}, writer, vocab_size=VOCAB_SIZE, has_head=True)
    tensors = load_file(quantised / "model.safetensors")
    lacking = "lm_head.qweight" if "gptq" in name else "lm_head.weight_packed"
    del tensors[lacking]
    save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"tensor {lacking} is missing"):
        PagedModel(quantised)


def test_a_head_that_the_configuration_does_not_tell_of_is_refused(tmp_path: Path) -> None:
    config, writer = FORMATS["gptq 64"]
    _, quantised = pair(tmp_path, "llama", config, writer, vocab_size=VOCAB_SIZE, has_head=True)
    with pytest.raises(ConfigError, match=r"tensor lm_head\.weight is missing"):
        PagedModel(quantised)


def by_size(out_size: int, in_size: int, seed: int) -> writers.Written:
    """The head in 8 bits, down projections in groups of 32, all others in groups of 64."""
    if out_size == VOCAB_SIZE:
        return writers.write_int_quantized(out_size, in_size, seed=seed)
    return pack(out_size, in_size, 32 if in_size == SIZES["intermediate_size"] else 64, seed=seed)


def group(targets: list[str], weights: dict[str, Any], form: str) -> dict[str, Any]:
    return {"targets": targets, "weights": weights, "format": form, "input_activations": None}


@pytest.mark.parametrize(
    "targets",
    [
        ("re:.*down_proj", "lm_head", "Linear"),
        ("re:model.layers.[0-9]+.mlp.down", "re:lm_head$", "Linear"),  # an expression is one of a name's start
        ("re:.*down_proj", "lm_head", "re:.*_proj$"),  # the first expression that fits decides
    ],
)
def test_groups_of_modules_have_formats_of_their_own(targets: tuple[str, str, str], tmp_path: Path) -> None:
    int4 = {"type": "int", "num_bits": 4, "strategy": "group", "symmetric": True}
    config = compressed(int4, format="mixed-precision", ignore=[]) | {
        "config_groups": {
            "group_0": group([targets[0]], {**int4, "group_size": 32}, "pack-quantized"),
            "group_1": group([targets[1]], INT8, "int-quantized"),
            "group_2": group([targets[2]], {**int4, "group_size": 64}, "pack-quantized"),
        }
    }
    plain, quantised = pair(tmp_path, "llama", config, by_size, vocab_size=VOCAB_SIZE, has_head=True)
    assert_same(plain, quantised)


def test_modules_that_no_group_names_are_plain(tmp_path: Path) -> None:
    config = pack_quantized(4, 64)
    config["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    plain, quantised = pair(
        tmp_path, "llama", config, FORMATS["w4a16"][1], is_kept=lambda module: "self_attn" in module
    )
    assert_same(plain, quantised)


@pytest.mark.parametrize("ignored", ["re:model.layers.0.", "re:.*layers.0", "re:.*layers\\.0\\."])
def test_an_ignored_expression_is_one_of_a_names_start(ignored: str, tmp_path: Path) -> None:
    config = {**pack_quantized(4, 64), "ignore": ["lm_head", ignored]}
    plain, quantised = pair(
        tmp_path, "llama", config, FORMATS["w4a16"][1], is_kept=lambda module: "layers.0." in module
    )
    assert_same(plain, quantised)


def test_settings_of_the_head_alone(tmp_path: Path) -> None:
    """GPTQModel's `dynamic` beside `lm_head`."""
    config = {**GPTQ, "group_size": 64, "lm_head": True, "dynamic": {"lm_head": {"bits": 8, "group_size": -1}}}

    def write(out_size: int, in_size: int, seed: int) -> writers.Written:
        if out_size == VOCAB_SIZE:
            return gptq(out_size, in_size, -1, bits=8, seed=seed)
        return gptq(out_size, in_size, 64, seed=seed)

    plain, quantised = pair(tmp_path, "llama", config, write, vocab_size=VOCAB_SIZE, has_head=True)
    assert_same(plain, quantised)
