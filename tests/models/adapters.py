"""Adapters for the tiny checkpoints, made by PEFT with random A and B, and what PEFT makes of model and adapter: the
independent reference. Merged in fp32, computed by transformers.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tests.models.tiny_checkpoints import load_reference

ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED_MODULES = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]  # as phi3 stores them
HALF_FUSED_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]  # as glm4 does
# In some families PEFT takes the name of any other projection for the experts', which it adapts as whole parameters.
ATTENTION_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj"]
STD = 0.2


def modules_of(checkpoint: str) -> list[str]:
    """Those of a family's projections, as its checkpoint calls them."""
    if checkpoint.startswith(("qwen3-moe", "glm4-moe")):
        return ATTENTION_MODULES
    if checkpoint.startswith("phi3"):
        return FUSED_MODULES
    return HALF_FUSED_MODULES if checkpoint.startswith("glm4") else ALL_MODULES


def write_adapter(checkpoint: Path, folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """An adapter of PEFT's own making for a checkpoint; every A and B is drawn."""
    model = load_reference(checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(seed)
    drawn = 0
    for name, values in adapted.named_parameters():
        if "lora_" in name:
            values.data.normal_(0.0, STD, generator=generator)
            drawn += 1
    assert drawn, "the adapter has no weights"
    adapted.save_pretrained(folder)
    return folder


def load_merged(checkpoint: Path, adapter: Path | None) -> PreTrainedModel:
    """The model with the adapter in its weights; None: without any."""
    model = load_reference(checkpoint)
    if adapter is None:
        return model
    merged: PreTrainedModel = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return merged.eval()
