"""A whole checkpoint quantised to w4a16 or w8a16 by rounding, as a compressed-tensors checkpoint of any size.

    python -m tests.models.rounded_checkpoint SOURCE TARGET [--bits 4] [--group 64]

No calibration: each group's scale is the one of some that lets its elements lose least. What `cb-backend bench accuracy
--beside TARGET` then tells is therefore more than a careful quantisation would lose.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.quantised_checkpoints import PROJECTION

_SHARES = tuple(1.0 - 0.025 * step for step in range(13))  # of a group's largest element that the scale may hold


def round_groups(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """(integers [out, in] from -2^(bits - 1) on, float16 scales [out, in / group]) of weight [out, in]."""
    out_size, in_size = weight.shape
    grouped = weight.float().view(out_size, in_size // group, group)
    largest = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-6)
    middle = 2 ** (bits - 1)
    least = torch.full_like(largest, float("inf"))
    integers, scales = torch.zeros_like(grouped), torch.zeros_like(largest)
    for share in _SHARES:
        scale = (largest * share / (middle - 0.5)).half().float()
        rounded = (grouped / scale).round().clamp(-middle, middle - 1)
        error = (rounded * scale - grouped).square().sum(-1, keepdim=True)
        is_better = error < least
        least = torch.where(is_better, error, least)
        integers, scales = torch.where(is_better, rounded, integers), torch.where(is_better, scale, scales)
    return integers.view(out_size, in_size).to(torch.int32), scales.squeeze(-1).half()


def pack_words(integers: Tensor, bits: int) -> Tensor:
    """int32 [out, in * bits / 32] of integers + 2^(bits - 1), the first in the lowest bits."""
    per_word = 32 // bits
    stored = (integers + 2 ** (bits - 1)).long().view(integers.shape[0], -1, per_word)
    words = (stored << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def write_rounded(source: Path, target: Path, bits: int = 4, group: int = 64, plain: Path | None = None) -> Path:
    """Quantise the projections of the checkpoint in `source`, which is one file; everything else is copied.

    plain: gets a checkpoint of float32 numbers, those that the quantised one stands for.
    """
    stored: dict[str, Tensor] = {}
    numbers = load_file(source / "model.safetensors")
    for name, tensor in numbers.items():
        if not PROJECTION.fullmatch(name):
            stored[name] = tensor
            continue
        integers, scales = round_groups(tensor, bits, group)
        if plain is not None:
            numbers[name] = integers * scales.float().repeat_interleave(group, 1)
        module = name.removesuffix(".weight")
        stored |= {
            f"{module}.weight_packed": pack_words(integers, bits),
            f"{module}.weight_scale": scales,
            f"{module}.weight_shape": torch.tensor(tensor.shape),
        }
    for folder, tensors in ((target, stored), (plain, numbers)):
        if folder is not None:
            shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weights = {"type": "int", "num_bits": bits, "symmetric": True, "strategy": "group", "group_size": group}
    values = json.loads((source / "config.json").read_text())
    values["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }
    (target / "config.json").write_text(json.dumps(values, indent=2))
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("target", type=Path, metavar="TARGET")
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--group", type=int, default=64)
    args = parser.parse_args()
    write_rounded(args.source, args.target, args.bits, args.group)


if __name__ == "__main__":
    main()
