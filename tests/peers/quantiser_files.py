"""Tiny checkpoints written by quantisation packages: run by `run_quantisers.py`, with the package on the path.

    python tests/peers/quantiser_files.py WRITER FORMAT FOLDER

Puts two checkpoints into FOLDER: `quantised`, as the package packs and names it, and `plain`, with the numbers that the
package itself makes of it again. Nothing of cb_backend is imported here.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 104, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
GROUP = 64


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(11)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.1)).eval()


def projections(model: LlamaForCausalLM, has_head: bool = False) -> list[tuple[str, nn.Linear]]:
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [(name, module) for name, module in linears if has_head or name != "lm_head"]


def add_to_config(folder: Path, quantization: dict[str, Any]) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": quantization}))


def save_packed(model: LlamaForCausalLM, folder: Path, packed: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    """The model with the tensors of `packed` instead of its projections' weights."""
    from safetensors.torch import save_file

    modules = {name.rpartition(".")[0] for name in packed}
    kept = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in modules}
    model.config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in {**kept, **packed}.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    add_to_config(folder, quantization)


def by_compressed_tensors(name: str, folder: Path) -> None:
    """One of its presets; scales by its own rules from each group's smallest and largest weight."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    preset, _, options = name.partition(" ")
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size == 128:
        scheme.weights.group_size = GROUP
    model = new_model()
    ignored = [] if "head" in options else ["lm_head"]
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignored))
    for module in (module for module in model.modules() if hasattr(module, "weight_scale")):
        weight = module.weight.detach()
        width = scheme.weights.group_size or weight.shape[1]
        grouped = weight.view(weight.shape[0], -1, width)
        total = None
        if hasattr(module, "weight_global_scale"):
            total = generate_gparam(weight.min(), weight.max())
            module.weight_global_scale.data = total.reshape(1)
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights, total)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zero.reshape(module.weight_zero_point.shape).to(
                module.weight_zero_point.dtype
            )
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    packed = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compressor.decompress_model(model)
    save_plain(model, folder / "plain")
    changed = {name: tensor for name, tensor in packed.items() if ".weight_" in name or tensor.dtype != torch.float32}
    model.config.save_pretrained(folder / "quantised")
    compressor.update_config(str(folder / "quantised"))
    quantization = json.loads((folder / "quantised" / "config.json").read_text())["quantization_config"]
    save_packed(model, folder / "quantised", changed, quantization)


def save_plain(model: LlamaForCausalLM, folder: Path) -> None:
    plain = new_model()
    wanted = plain.state_dict()
    plain.load_state_dict({name: model.state_dict()[name].float() for name in wanted})
    plain.save_pretrained(folder)


def rounded(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the weight in steps of its groups' scales, scales and zero points [out, groups])."""
    grouped = weight.detach().view(weight.shape[0], -1, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    steps = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1) - zeros[..., None]
    return (steps * scales[..., None]).view_as(weight), scales, zeros


def by_autoawq(name: str, folder: Path) -> None:
    """Its own file of the gemm layout, without the package around it: that imports what a CPU does not have."""
    for package in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        without_init(package)
    gemm = importlib.import_module("awq.modules.linear.gemm")
    dequantize = importlib.import_module("awq.utils.packing_utils").dequantize_gemm
    group = int(name)
    model, packed = new_model(), {}
    for module_name, module in projections(model):
        weight, scales, zeros = rounded(module.weight, 4, group)
        module.weight.data = weight
        made = gemm.WQLinear_GEMM.from_linear(module, 4, group, False, scales.t().half(), zeros.t())
        packed |= {f"{module_name}.{part}": getattr(made, part) for part in ("qweight", "qzeros", "scales")}
        again = dequantize(made.qweight, made.qzeros, made.scales.float(), 4, group)
        module.weight.data = again.t().contiguous().float()
    model.save_pretrained(folder / "plain")
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    save_packed(model, folder / "quantised", packed, config)


def without_init(name: str) -> None:
    """Stands for a package of the path: its modules can be imported, its own code does not run."""
    parent, _, last = name.rpartition(".")
    roots = sys.modules[parent].__path__ if parent else sys.path
    found = next(str(Path(root) / last) for root in roots if (Path(root) / last).is_dir())
    module = types.ModuleType(name)
    module.__path__ = [found]
    sys.modules[name] = module


def by_gptqmodel(name: str, folder: Path) -> None:
    """`pack` of its torch layer, and what the layer itself makes of it again."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    options = dict(part.split("=") for part in name.split(",") if "=" in part)
    bits, group = int(options["bits"]), int(options["group"])
    is_act_order, has_head = "desc_act" in name, "head" in name
    model, packed = new_model(), {}
    for module_name, module in projections(model, has_head):
        in_size = module.in_features
        order = torch.randperm(in_size, generator=torch.Generator().manual_seed(1)) if is_act_order else None
        groups = torch.arange(in_size) // group
        g_idx = groups if order is None else groups[order]
        sorted_columns = g_idx.argsort(stable=True)
        weight, scales, zeros = rounded(module.weight[:, sorted_columns], bits, group)
        module.weight.data = weight[:, sorted_columns.argsort()].contiguous()
        made = TorchLinear(
            bits=bits, group_size=group, sym=False, desc_act=is_act_order, in_features=in_size,
            out_features=module.out_features, bias=False, pack_dtype=torch.int32,
        )  # fmt: skip
        made.pack_original(copy.deepcopy(module), scales, zeros, g_idx.int())  # in Python, and in nothing to compile
        parts = ("qweight", "qzeros", "scales", "g_idx")
        packed |= {f"{module_name}.{part}": getattr(made, part).clone() for part in parts}
        made.scales = made.scales.float()  # its numbers would be rounded to their type
        module.weight.data = made.dequantize_weight().t().contiguous().float()
    model.save_pretrained(folder / "plain")
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, "desc_act": is_act_order,
        "lm_head": has_head, "checkpoint_format": "gptq_v2",
    }  # fmt: skip
    save_packed(model, folder / "quantised", packed, config)


WRITERS: dict[str, Callable[[str, Path], None]] = {
    "compressed-tensors": by_compressed_tensors,
    "autoawq": by_autoawq,
    "gptqmodel": by_gptqmodel,
}

if __name__ == "__main__":
    WRITERS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
