"""Another checkpoint of the same specification, for tests of updates: the same files, with noise on every weight."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def noisy_copy(checkpoint: Path, folder: Path, deviation: float) -> Path:
    """Write it to `folder`, which must not exist yet; always the same noise, with this standard deviation."""
    shutil.copytree(checkpoint, folder)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    noisy = {name: each + deviation * torch.randn(each.shape, generator=generator) for name, each in tensors.items()}
    save_file(noisy, folder / "model.safetensors", {"format": "pt"})
    return folder
