"""Tensors of a quantised checkpoint in another type than its format has: named, never taken for what they are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cb_backend.contracts.errors import ConfigError
from tests.models.paged_model import PagedModel
from tests.models.quantised_models import FORMATS, logits, pair

FILE = "model.safetensors"
# (format, end of a tensor's name, type that it is given, what the format has)
WRONG = [
    ("w8a8", "down_proj.weight", torch.bfloat16, "is BF16; int-quantized int8 stores I8"),
    ("w8a8", "down_proj.weight", torch.uint8, "is U8; int-quantized int8 stores I8"),
    ("w8a8", "down_proj.weight_scale", torch.int32, "is I32; int-quantized int8 stores F64 or F32 or F16 or BF16"),
    ("gptq 64", "up_proj.scales", torch.int32, "is I32; GPTQ int4, groups of 64 stores F64 or F32 or F16 or BF16"),
    ("gptq 64", "up_proj.qweight", torch.int64, "is I64; GPTQ int4, groups of 64 stores I32"),
    ("gptq act-order", "up_proj.g_idx", torch.float32, "is F32; GPTQ int4, groups of 32 stores I64 or I32"),
    ("awq 64", "o_proj.qweight", torch.float32, "is F32; AWQ int4, groups of 64 stores I32"),
    ("w4a16", "q_proj.weight_shape", torch.float32, "is F32; pack-quantized int4, groups of 64 stores I64 or I32"),
    ("w4a16, zeros", "q_proj.weight_zero_point", torch.uint8, "is U8; pack-quantized int4, groups of 32 stores I32"),
    ("fp8 blocks", "down_proj.weight", torch.float32, "is F32; fp8, blocks of 128 x 128 stores F8_E4M3"),
    ("fp8 blocks", "down_proj.weight_scale_inv", torch.uint8, "is U8; fp8, blocks of 128 x 128 stores"),
    ("nvfp4", "k_proj.weight_packed", torch.int8, "is I8; nvfp4 stores U8"),
    ("nvfp4 of ModelOpt", "k_proj.weight_scale_2", torch.int8, "is I8; nvfp4 of ModelOpt stores"),
    ("mxfp4", "k_proj.weight_scale", torch.bfloat16, "is BF16; mxfp4 stores F8_E8M0 or U8"),
    ("w4a16", "model.norm.weight", torch.int8, "is I8; embedding, norms and what is left unquantised are supported in"),
    ("w4a16", "embed_tokens.weight", torch.float8_e4m3fn, "is F8_E4M3; embedding, norms and what is left"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "ending", "dtype", "reason"), WRONG)
def test_another_type_is_named(form: str, ending: str, dtype: torch.dtype, reason: str, tmp_path: Path) -> None:
    config, writer = FORMATS[form]
    _, quantised = pair(tmp_path, "llama", config, writer)
    tensors = load_file(quantised / FILE)
    name = max(name for name in tensors if name.endswith(ending))
    save_file({**tensors, name: tensors[name].to(dtype)}, quantised / FILE, {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"^{FILE}: tensor {re.escape(name)} {re.escape(reason)}"):
        PagedModel(quantised)


def test_weights_that_were_rounded_and_saved_in_16_bits_are_not_taken_for_int8(tmp_path: Path) -> None:
    config, writer = FORMATS["w8a8"]
    _, quantised = pair(tmp_path, "llama", config, writer)
    tensors = load_file(quantised / FILE)
    for name in [name for name in tensors if tensors[name].dtype == torch.int8]:
        tensors[name] = (tensors[name] * tensors[f"{name}_scale"].float()).bfloat16()
    save_file(tensors, quantised / FILE, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"q_proj\.weight is BF16; int-quantized int8 stores I8\. Write it anew"):
        PagedModel(quantised)


@pytest.mark.parametrize("form", ["w4a16", "gptq act-order"])
def test_types_that_mean_the_same_are_read(form: str, tmp_path: Path) -> None:
    config, writer = FORMATS[form]
    plain, quantised = pair(tmp_path, "llama", config, writer)
    tensors = load_file(quantised / FILE)
    for name, tensor in tensors.items():
        if name.endswith("weight_shape"):
            tensors[name] = tensor.int()
        elif name.endswith("g_idx"):
            tensors[name] = tensor.long()
        elif tensor.dtype.is_floating_point:
            tensors[name] = tensor.float()
    save_file(tensors, quantised / FILE, {"format": "pt"})
    torch.testing.assert_close(logits(quantised), logits(plain), atol=1e-4, rtol=0)
