"""Adapters for the tiny checkpoint, as PEFT saves them, and what transformers answers with them merged in.

Random A and B of a size that changes most greedy choices: an adapter that is ignored, or another's, gives other text.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.server.tiny_checkpoint import Reference

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STRENGTH = 0.12
_PREFIX = "base_model.model."


def write_adapter(
    folder: Path, checkpoint: Path, seed: int, rank: int = 4, alpha: float = 8.0, modules: tuple[str, ...] = MODULES
) -> Path:
    """Into `folder`, which may hold another one: both files are renamed into their places."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = adapter_tensors(checkpoint, seed, rank, modules)
    save_file(tensors, folder / "new.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(checkpoint), "r": rank,
        "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": list(modules),
        "inference_mode": True, "fan_in_fan_out": False, "modules_to_save": None, "init_lora_weights": True,
    }  # fmt: skip
    (folder / "new.json").write_text(json.dumps(config, indent=2))
    (folder / "new.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "new.json").rename(folder / "adapter_config.json")
    return folder


def adapter_tensors(checkpoint: Path, seed: int, rank: int, modules: tuple[str, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, weight in sorted(load_file(file).items()):
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in modules:
                out_size, in_size = weight.shape
                for half, shape in (("A", (rank, in_size)), ("B", (out_size, rank))):
                    value = torch.randn(shape, generator=generator) * STRENGTH
                    tensors[f"{_PREFIX}{module}.lora_{half}.weight"] = value
    return tensors


class MergedReference(Reference):
    """The checkpoint with an adapter's product added to its weights."""

    def __init__(self, checkpoint: Path, adapter: Path) -> None:
        super().__init__(checkpoint)
        config = json.loads((adapter / "adapter_config.json").read_text())
        tensors = load_file(adapter / "adapter_model.safetensors")
        model: LlamaForCausalLM = self.model
        scale = config["lora_alpha"] / config["r"]
        for name in tensors:
            if name.endswith(".lora_A.weight"):
                module = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
                weight = model.get_parameter(f"{module}.weight")
                product = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
                with torch.no_grad():
                    weight += scale * product
