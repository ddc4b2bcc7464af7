"""From a checkpoint's folder to a model that can run: reads its config, builds its family, fills its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cb_backend.errors import ConfigError
from cb_backend.json_files import read_json_object
from cb_backend.layers.fp8_linear import Fp8Linear
from cb_backend.layers.linear import Linear
from cb_backend.layers.ops import Ops
from cb_backend.models import llama, mistral, qwen2, qwen3, weights
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.model_config import JsonReader, ModelConfig, read_token_ids
from cb_backend.models.quantization import FP8

FAMILIES = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3}


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json`; end-of-sequence ids come from `generation_config.json` where that sets them.

    Raises `ConfigError` for a broken file, an unsupported model_type or an unsupported option.
    """
    values = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        reader = JsonReader(_read_json(generation), generation.name)
        if eos_token_ids := read_token_ids(reader, "eos_token_id"):
            values["eos_token_id"] = list(eos_token_ids)
    reader = JsonReader(values)
    model_type = reader.get("model_type", str)
    if model_type not in FAMILIES:
        raise ConfigError(f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[model_type].read_config(reader)


def resolve_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's dtype on a GPU and float32 on a CPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else config.dtype
    return getattr(torch, name)


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    has_kv_scales: bool = False,
    quantization: str | None = None,
) -> DecoderForCausalLM:
    """Build the model and fill it from the folder's safetensors, or with random numbers (`load_format` dummy).

    `progress` is called with 0.25, 0.5, 0.75 and 1.0 as that share of the bytes is loaded. `has_kv_scales`: the cache
    is to be fp8, so the scales of keys and values that the checkpoint may bring are used (1.0 where it brings none).
    `quantization` fp8: the layers' matrices are quantised while they are loaded, if they are not in the file.
    Raises `ConfigError` that names file and tensor.
    """
    model_class = FAMILIES[config.model_type].MODEL_CLASS
    is_fp8 = FP8 in (quantization, config.quantization)
    given: Any = {"dtype": dtype, "device": device, "linear_class": Fp8Linear if is_fp8 else Linear}
    if load_format == "dummy":
        has_own_head = not config.tie_word_embeddings
        model = model_class(config, ops, has_own_head=has_own_head, **given)
        weights.fill_dummy(model.checkpoint_tensors(), seed)
        return model
    source = weights.open_checkpoint(folder, is_fp8=config.quantization == FP8)
    # A tied config with a head in the file: transformers uses that head when it differs from the embedding.
    has_own_head = not config.tie_word_embeddings or weights.HEAD in source.files
    model = model_class(config, ops, has_own_head=has_own_head, **given)
    weights.fill_from_checkpoint(dict(model.checkpoint_tensors()), source, progress)
    if config.tie_word_embeddings and torch.equal(model.lm_head.weight, model.embed_tokens.weight):
        model.tie_head()
    if has_kv_scales:
        _set_kv_scales(model, source)
    return model


def _set_kv_scales(model: DecoderForCausalLM, source: weights.CheckpointFiles) -> None:
    for index, layer in enumerate(model.layers):
        attention = layer.self_attn
        attention.key_scale, attention.value_scale = (
            weights.read_kv_scale(source, f"model.layers.{index}.self_attn", kind) for kind in "kv"
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path.name} is missing in the checkpoint's folder")
    return read_json_object(path)
