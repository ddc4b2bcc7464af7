"""Tiny GGUF files, written from a checkpoint folder by the rules of the format's own converter.

The result is plain data until it is written, so that a test can break or change exactly one thing of it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.tiny_checkpoints import write_checkpoint

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# A byte-level BPE of 97 tokens: control tokens at 0 to 4, bytes (! to z, space, line break, the two of é), two merges.
_BYTES = [*sorted(set(ByteLevel.alphabet()) - set('"#$%'))[:86], "Ġ", "Ċ", "Ã", "©"]
BYTE_TOKENS = [
    "<|endoftext|>", "<s>", "</s>", "<|turn|>", "<|end|>", *_BYTES, "ab", "abc",
]  # fmt: skip
BYTE_MERGES = ["a b", "ab c"]
BYTE_TYPES = [CONTROL] * 5 + [NORMAL] * 92

# Sentencepiece: four control tokens, some bytes, characters, and pieces whose scores say how they are merged.
PIECES = ["<unk>", "<s>", "</s>", "<|turn|>", "<0x0A>", "<0xC3>", "<0xA9>", "▁", *map(chr, range(97, 123)),
          "▁a", "ab", "▁ab", "abc", "▁abc", "▁t", "he", "▁the"]  # fmt: skip
PIECES += [chr(ord("一") + i) for i in range(97 - len(PIECES))]
PIECE_TYPES = [UNKNOWN, CONTROL, CONTROL, CONTROL, BYTE, BYTE, BYTE] + [NORMAL] * 90
PIECE_SCORES = (
    [0.0] * 7 + [-1000.0 - i for i in range(27)] + [-1.0 - i for i in range(8)] + [-2000.0 - i for i in range(55)]
)

_MODULES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.layers": "blk",
}  # fmt: skip

# Where a block has 16-bit numbers, if not at its start alone.
_NUMBERS = {**dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}


@dataclass
class GgufFile:
    """What a file will hold; change it, then write it."""

    architecture: str
    metadata: dict[str, Any]  # int, float, bool, str or lists of them; None: the key is left out
    tensors: dict[str, np.ndarray]  # numbers, or uint8 rows of blocks
    kinds: dict[str, gguf.GGMLQuantizationType] = field(default_factory=dict)  # name -> quantisation; others are F32

    def without(self, pattern: str) -> GgufFile:
        """Drop the tensors whose whole name matches."""
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if not re.fullmatch(pattern, name)}
        return self

    def quantised(self, kind: gguf.GGMLQuantizationType, pattern: str = r".*weight") -> GgufFile:
        """Matrices that match and whose rows the kind's blocks divide."""
        block = gguf.GGML_QUANT_SIZES[kind][0]
        for name, tensor in self.tensors.items():
            if re.fullmatch(pattern, name) and tensor.ndim == 2 and tensor.shape[1] % block == 0:
                self.kinds[name] = kind
        return self

    def write(self, path: Path) -> Path:
        _write(path, self.architecture, self.metadata, self.tensors, self.kinds)
        return path

    def write_split(self, folder: Path, stem: str, count: int, suffix: str = "gguf") -> list[Path]:
        """As the format's splitter does: metadata in the first part alone, tensors in order over all of them."""
        names = np.array_split(np.array(list(self.tensors)), count)
        paths = [folder / f"{stem}-{number:05}-of-{count:05}.{suffix}" for number in range(1, count + 1)]
        for number, path in enumerate(paths):
            split = {"split.no": number, "split.count": count, "split.tensors.count": len(self.tensors)}
            metadata = self.metadata | split if number == 0 else split
            tensors = {name: self.tensors[name] for name in names[number]}
            _write(path, self.architecture, metadata, tensors, self.kinds)
        return paths


def gguf_of(source: Path) -> GgufFile:
    """The checkpoint in `source` as a file; its rope scaling is left out, and its tokenizer is `byte_level`."""
    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        match = re.search(r"self_attn\.([qk])_proj", name)
        if architecture == "llama" and match:
            tensor = _interleaved(tensor, heads[match[1]])
        for theirs, ours in _MODULES.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor.float().numpy()
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "rope.dimension_count": (head_dim := config.get("head_dim") or config["hidden_size"] // heads["q"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": config["vocab_size"],
    }
    metadata = {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in keys.items()}}
    return GgufFile(architecture, metadata | byte_level(), tensors)


def tiny_gguf(name: str, folder: Path) -> tuple[Path, GgufFile]:
    """The checkpoint of this name among the tiny ones, written to `folder`, and the same as a GGUF file to be."""
    source = write_checkpoint(name, folder)
    return source, gguf_of(source)


def byte_level(**changes: Any) -> dict[str, Any]:
    """Metadata of the byte-level tokenizer; `changes` by the key behind `tokenizer.ggml.`, None to leave one out."""
    values = {
        "model": "gpt2", "pre": "gpt-2", "tokens": BYTE_TOKENS, "token_type": BYTE_TYPES, "merges": BYTE_MERGES,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Metadata of the sentencepiece tokenizer, as `byte_level`."""
    values = {
        "model": "llama", "pre": "default", "tokens": PIECES, "token_type": PIECE_TYPES, "scores": PIECE_SCORES,
        "merges": None, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}


def rope_factors(source: Path) -> np.ndarray:
    """The tensor by which the format carries the llama3 scaling: unscaled frequencies by those of transformers."""
    config = AutoConfig.from_pretrained(source)
    scaled, _ = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, torch.device("cpu"))
    head_dim = config.hidden_size // config.num_attention_heads
    unscaled = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return (unscaled / scaled).numpy()


def random_rows(kind: str, out_size: int, in_size: int, *, seed: int = 0, size: float = 0.01) -> np.ndarray:
    """uint8 rows of blocks. Any bytes are blocks; the 16-bit numbers among them are made finite, about `size`."""
    generator = np.random.default_rng(seed)
    num_elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    num_blocks = in_size // num_elements
    rows = generator.integers(0, 256, (out_size, num_blocks, num_bytes), dtype=np.uint8)
    for start in _NUMBERS.get(kind, (0,)):
        numbers = generator.normal(0, size, (out_size, num_blocks, 1)).astype(np.float16)
        rows[:, :, start : start + 2] = numbers.view(np.uint8)
    return rows.reshape(out_size, -1)


def _interleaved(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from halves to pairs."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _write(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kinds: dict[str, gguf.GGMLQuantizationType],
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if key != "general.architecture" and value is not None:
            _add(writer, key, value)
    for name, tensor in tensors.items():
        kind = kinds.get(name)
        data = tensor if kind is None or tensor.dtype == np.uint8 else gguf.quantize(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
