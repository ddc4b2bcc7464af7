"""Checkpoints of pictures and text: their model of text is served as transformers computes it for text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.registry import read_model_config
from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import random_tokens

FILE = "model.safetensors"
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PIXTRAL = {**SIGLIP, "model_type": "pixtral", "head_dim": 8}
PROMPT = random_tokens(30, seed=3)


def make_gemma3() -> torch.nn.Module:
    text = {**SIZES, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma3Config(text_config=text, vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=90)
    return Gemma3ForConditionalGeneration(config)


def make_mistral3(text_type: str = "ministral3") -> torch.nn.Module:
    text = {**SIZES, "model_type": text_type, "tie_word_embeddings": False}
    if text_type == "mistral":
        text["sliding_window"] = 7
    config = Mistral3Config(text_config=text, vision_config=PIXTRAL, image_token_index=90)
    return Mistral3ForConditionalGeneration(config)


MODELS = {"gemma3": make_gemma3, "mistral3": make_mistral3, "mistral3-mistral": lambda: make_mistral3("mistral")}


def write(name: str, folder: Path) -> torch.nn.Module:
    torch.manual_seed(len(name))
    model = MODELS[name]().eval()
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


def logits_of(folder: Path) -> torch.Tensor:
    paged = PagedModel(folder)
    paged.start(0, len(PROMPT))
    return paged.prefill(0, PROMPT, 11)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_the_model_of_text_is_served(name: str, tmp_path: Path) -> None:
    model = write(name, tmp_path)
    assert any("vision" in tensor for tensor in load_file(tmp_path / FILE))
    wanted = model(input_ids=torch.tensor([PROMPT])).logits[0]
    assert (logits_of(tmp_path) - wanted).abs().max() < 1e-4
    assert read_model_config(tmp_path).model_type == name.partition("-")[0]


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("model.language_model.model.", "model.language_model.lm_head."),
        ("model.", "lm_head."),
    ],
)
def test_tensors_are_found_by_all_names_that_are_in_use(prefix: str, head: str, tmp_path: Path) -> None:
    write("mistral3", tmp_path)
    wanted = logits_of(tmp_path)
    tensors, renamed = load_file(tmp_path / FILE), {}
    for name, tensor in tensors.items():
        if "vision" in name or "projector" in name:
            renamed[name] = tensor
        elif "lm_head" in name:
            renamed[head + "weight"] = tensor
        else:
            inner = name[min(name.find(part) for part in ("embed_tokens", "layers.", "norm.weight") if part in name) :]
            renamed[prefix + inner] = tensor
    save_file(renamed, tmp_path / FILE, {"format": "pt"})
    assert torch.equal(logits_of(tmp_path), wanted)


def test_what_is_no_part_of_vision_still_needs_a_place(tmp_path: Path) -> None:
    write("gemma3", tmp_path)
    tensors = load_file(tmp_path / FILE)
    save_file({**tensors, "audio_tower.weight": torch.ones(3)}, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"audio_tower\.weight has no place"):
        logits_of(tmp_path)


def change(folder: Path, **text: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["text_config"].update(text)
    (folder / "config.json").write_text(json.dumps(values))


def test_what_a_nested_configuration_leaves_out_is_the_default(tmp_path: Path) -> None:
    """As published: only what differs from the default is written."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    values = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    spec = read_model_config(tmp_path)
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (262_208, 8, 4, 256)
    assert spec.windows == ((1024,) * 5 + (0,)) * 5 + (1024,) * 4
    assert [(rope.theta, rope.factor) for rope in spec.ropes] == [(10_000.0, 1.0), (1_000_000.0, 8.0)]
    assert (spec.eos_token_ids, spec.dtype, spec.max_context_len) == ((1, 106), "bfloat16", 131_072)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "mistral3",
            {"model_type": "mamba"},
            r"config\.json \(text_config\): model_type 'mamba' is not supported there",
        ),
        ("mistral3", {"hidden_size": "x"}, r"config\.json \(text_config\): 'hidden_size' must be of type int"),
        ("gemma3", {"use_bidirectional_attention": True}, r"use_bidirectional_attention is true"),
        ("gemma3", {"attn_logit_softcapping": 20.0}, r"attn_logit_softcapping is 20.0; Gemma 3 caps no scores"),
    ],
)
def test_what_cannot_be_served_is_named(name: str, text: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    change(tmp_path, **text)
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path)
