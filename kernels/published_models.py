"""The models that whole steps are timed with, as their `config.json`s tell of them.

    python kernels/published_models.py FOLDER NAME [FORMAT]    # FOLDER/NAME/config.json for engines with random weights

It prints the folder of the `config.json`. FORMAT is that of the checkpoint's weights: w4a16, gguf q4_k, ...
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roofline import HAS_QK_NORM, MODELS

from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.registry import read_spec
from cb_backend.models.spec import ModelSpec

# Of other sizes, and of families that other switches of the kernels are for, than those of `roofline.MODELS`.
OTHERS: dict[str, dict[str, Any]] = {
    "llama-3.2-3b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "llama-2-7b": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096,
    },
    "llama-2-13b": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824,
        "num_hidden_layers": 40, "num_attention_heads": 40, "max_position_embeddings": 4096,
    },
    "llama-3.1-70b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rope_theta": 500000.0,
    },
    "gemma3-4b": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131072, "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi-4": {
        "model_type": "phi3", "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10,
        "max_position_embeddings": 16384, "rope_theta": 250000.0,
    },
    "olmo3-7b": {
        "model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 65536, "sliding_window": 4096,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}  # fmt: skip
NAMES_NO_DTYPE = {"gpt-oss-20b", "gpt-oss-120b"}  # in their published configs: the weights' own counts


# What a checkpoint's config says of weights that are stored in a format.
_W4 = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 128}
STORED: dict[str, dict[str, Any]] = {
    "w4a16": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _W4}},
    },
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
}  # fmt: skip
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def config_values(name: str) -> dict[str, Any]:
    """What the model's `config.json` holds. Raises `KeyError` for a name that is not known."""
    if name in OTHERS:
        return {**OTHERS[name], **({} if name in NAMES_NO_DTYPE else {"dtype": "bfloat16"})}
    shape = MODELS[name]
    return {
        "model_type": "qwen3" if name in HAS_QK_NORM else "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 16384,
        "rope_theta": 500000.0,
        "tie_word_embeddings": name != "llama-3.1-8b",
        "dtype": "bfloat16",
    }


def spec_of(name: str) -> ModelSpec:
    return read_spec(ConfigReader(config_values(name), name))


def stored_values(name: str, label: str) -> dict[str, Any]:
    """`config_values` of a checkpoint with weights in a format: bf16, one of `STORED`, or GGUF's blocks: `gguf q4_k`.

    Raises `ValueError` for another format, and `KeyError` for a name that is not known.
    """
    values = config_values(name)
    if label in STORED:
        values["quantization_config"] = STORED[label]
    elif label.startswith("gguf "):
        kind = label.removeprefix("gguf ").upper()
        values["quantization_config"] = _blocks_of_gguf(kind, values["num_hidden_layers"])
    elif label != "bf16":
        raise ValueError(f"weights are stored as {', '.join(['bf16', *STORED])} or `gguf KIND`, not as {label!r}")
    return values


def _blocks_of_gguf(kind: str, num_layers: int) -> dict[str, Any]:
    """All matrices of the layers in one kind of blocks."""
    names = [f"self_attn.{part}" for part in _MATRICES[0]] + [f"mlp.{part}" for part in _MATRICES[1]]
    modules = {f"model.layers.{layer}.{name}": kind for layer in range(num_layers) for name in names}
    return {"quant_method": "gguf", "modules": modules}


def write_config(folder: Path, name: str, label: str = "bf16") -> Path:
    """A folder below this one with `stored_values` as its `config.json`, which is written over where there is one."""
    model = folder / "-".join([name, *label.split()])
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(stored_values(name, label)))
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=[*MODELS, *OTHERS])
    parser.add_argument("format", nargs="?", default="bf16", help=f"bf16, {', '.join(STORED)}, gguf q4_k, ...")
    arguments = parser.parse_args()
    try:
        print(write_config(arguments.folder, arguments.name, arguments.format))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
