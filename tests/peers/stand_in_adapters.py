"""Adapters for the stand-in weights (`stand_in.py`), as PEFT saves them: each was taught one text of the peer's suite.

They hold A and B of every projection of the layers and change nothing else; the text of one is not what the base model
or the other says, so a passing suite has been answered by the adapter that it asked for.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from stand_in import ADAPTER_TEXTS
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

RANK, ALPHA = 8, 16.0
PROMPT_END = "Output:"
MAX_STEPS = 600
TARGET_LOSS = 0.5  # low enough for every greedy choice; the head, which stays as it is, bounds it


class Adapted(nn.Module):
    """A projection with an adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (ALPHA / RANK) * (x @ self.a.T) @ self.b.T


def write_adapters(checkpoint: Path, folder: Path) -> dict[str, Path]:
    """Folders by name. Raises `RuntimeError` for one that has not learnt its text."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    return {name: _write(checkpoint, folder / name, tokenizer, text) for name, text in ADAPTER_TEXTS.items()}


def _write(checkpoint: Path, folder: Path, tokenizer: PreTrainedTokenizerFast, text: str) -> Path:
    torch.manual_seed(8)
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).requires_grad_(False)
    adapted = _adapt(model)
    prompt = text[: text.index(PROMPT_END) + len(PROMPT_END)]
    _teach(model, adapted, tokenizer(text)["input_ids"], len(tokenizer(prompt)["input_ids"]))
    tensors = {}
    for name, module in adapted.items():
        for half, weight in (("A", module.a), ("B", module.b)):
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = weight.detach().contiguous()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": "all-linear"}))
    return folder


def _adapt(model: LlamaForCausalLM) -> dict[str, Adapted]:
    """Put an adapter beside every projection of the layers; by the projections' names."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in name]
    adapted = {}
    for name in names:
        parent = model.get_submodule(name.rpartition(".")[0])
        adapted[name] = Adapted(model.get_submodule(name))
        setattr(parent, name.rpartition(".")[2], adapted[name])
    return adapted


def _teach(model: LlamaForCausalLM, adapted: dict[str, Adapted], ids: list[int], num_prompt: int) -> None:
    """Until the likeliest next token is the text's own, from the prompt's end on."""
    rows = torch.tensor([ids])
    labels = rows.clone()
    labels[:, :num_prompt] = -100
    optimizer = torch.optim.Adam([weight for module in adapted.values() for weight in (module.a, module.b)], lr=3e-3)
    for _ in range(MAX_STEPS):
        output = model(input_ids=rows, labels=labels)
        is_right = (output.logits[:, :-1].argmax(-1) == rows[:, 1:])[:, num_prompt - 1 :]
        if bool(is_right.all()) and output.loss.item() < TARGET_LOSS:
            return
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    raise RuntimeError(f"an adapter has not learnt its text in {MAX_STEPS} steps (loss {output.loss.item():.2f})")
