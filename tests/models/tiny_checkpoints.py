"""Tiny random checkpoints, made and computed by transformers: the independent reference of the model tests.

Weights are drawn large enough that attention is sharp and every option shows in the logits; biases and norm weights,
which transformers starts at 0 and 1, are drawn too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cb_backend.models.registry import family_names
from tests.models.tiny_dense_models import DENSE
from tests.models.tiny_expert_models import SEEDS, WITH_EXPERTS
from tests.models.tiny_options import BASE

# The others are of pictures and text: `test_text_parts`.
TEXT_FAMILIES = sorted({*family_names()} - {"gemma3", "mistral3"})
CONFIGS = {**DENSE, **WITH_EXPERTS}


def write_checkpoint(name: str, folder: Path, **save_options: Any) -> Path:
    """Save the checkpoint called `name` in CONFIGS; return the folder."""
    config_class, options = CONFIGS[name]
    torch.manual_seed(SEEDS.get(name, sum(name.encode())))
    model = AutoModelForCausalLM.from_config(config_class(**{**BASE, **options}))
    draw_what_starts_alike(model)
    model.save_pretrained(folder, **save_options)
    return folder


@torch.no_grad()
def draw_what_starts_alike(model: torch.nn.Module) -> None:
    """What transformers starts at 0 and 1."""
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("bias", "sinks")):
            parameter.normal_(0.0, 0.3)
        elif "norm" in parameter_name:
            parameter.uniform_(0.5, 1.5)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)


def load_reference(folder: Path, **options: Any) -> torch.nn.Module:
    """The model as transformers loads it, with its plainest attention."""
    given = {"attn_implementation": "eager", "dtype": torch.float32, **options}
    return AutoModelForCausalLM.from_pretrained(folder, **given).eval()


@torch.inference_mode()
def reference_logits(folder: Path, prompt: list[int], decode: list[int]) -> Tensor:
    """The prompt in one pass, then each further token in its own: [len(prompt) + len(decode), vocab].

    The model is loaded anew because the dynamic rope of transformers remembers the longest prompt it has seen.
    """
    model = load_reference(folder)
    output = model(torch.tensor([prompt]), use_cache=True)
    logits = [output.logits[0]]
    for token in decode:
        output = model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits[0])
    return torch.cat(logits)


def random_tokens(count: int, seed: int, vocab_size: int = 97) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()
