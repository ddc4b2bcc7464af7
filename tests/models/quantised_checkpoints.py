"""Tiny checkpoints whose projections are quantised by the tests' own writers, and the same weights written out.

The second is what a quantised model must equal: an unquantised checkpoint of exactly the numbers that the first one's
integers and scales stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.quantised_writers import Written

PROJECTION = re.compile(r".*\.(?:(?:q|k|v|o|gate|up|down|qkv|gate_up)_proj|w1|w2|w3)\.weight")
ROUTER = re.compile(r".*\.(?:mlp|block_sparse_moe)\.gate\.weight")
HEAD = "lm_head"
Writer = Callable[[int, int, int], Written]  # out_size, in_size, seed


def write_pair(
    plain: Path,
    quantised: Path,
    config: dict[str, Any],
    writer: Writer,
    is_kept: Callable[[str], bool] = lambda name: False,
    has_head: bool = False,
    has_routers: bool = False,
) -> None:
    """Turn the checkpoint in `plain` into its quantised form in `quantised`; `plain` gets the numbers of that.

    is_kept: modules that stay as they are, by their names. has_head: `lm_head` is quantised too; a tied model gets a
    head of its own. has_routers: those of mixtures are, too.
    """
    tensors = load_file(plain / "model.safetensors")
    if has_head:
        tensors.setdefault(f"{HEAD}.weight", tensors["model.embed_tokens.weight"].clone())
    stored: dict[str, torch.Tensor] = {}
    for seed, name in enumerate(sorted(tensors)):
        module = name.removesuffix(".weight")
        is_quantised = PROJECTION.fullmatch(name) is not None or (has_head and module == HEAD)
        is_quantised |= has_routers and ROUTER.fullmatch(name) is not None
        if not is_quantised or is_kept(module):
            stored[name] = tensors[name]
            continue
        written, weight = writer(*tensors[name].shape, seed)
        tensors[name] = weight.to(torch.float32).contiguous()
        stored |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in written.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
