"""Tensors of a GGUF file as those of a checkpoint folder: names, shapes, the order of rows, and safetensors files.

Which tensors there must be follows from the model's config alone, so a file that lacks one or has one too many is
refused before anything is written. Matrices of layers and the head keep the file's own blocks where these can be served
(`models.gguf_blocks`); other quantised values are written in float32, which keeps them exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.layer_spec import MLPSpec
from cb_backend.models.gguf.model_settings import EMBEDDING
from cb_backend.models.gguf.model_settings import HEAD as GGUF_HEAD
from cb_backend.models.gguf.rope_scaling import ROPE_FACTORS
from cb_backend.models.gguf.source import GgufSource, GgufTensor, listed
from cb_backend.models.gguf_blocks import BLOCK_KINDS
from cb_backend.models.packed_formats import GGUF_BLOCKS
from cb_backend.models.spec import ModelSpec, Names
from cb_backend.models.weight_files import INDEX

_MAX_FILE_BYTES = 2 << 30
_KEPT_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the file belongs in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    num_heads: int = 0  # above 0: rows of these heads are in the order of interleaved rotary embeddings
    is_matrix: bool = False  # of a product: a layer's or the head's

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


def places_of(config: ModelSpec, has_interleaved_rope: bool) -> dict[str, Place]:
    """GGUF name -> place, for every tensor that the model needs. `has_interleaved_rope`: the rows of q and k are in
    pairs, as files of the llama architecture have them.
    """
    hidden = config.hidden_size
    places = {
        EMBEDDING: Place("model.embed_tokens.weight", (config.vocab_size, hidden)),
        "output_norm.weight": Place("model.norm.weight", (hidden,)),
    }
    if not config.tie_word_embeddings:
        places[GGUF_HEAD] = Place(Names().head, (config.vocab_size, hidden), is_matrix=True)
    for layer in range(config.num_layers):
        for theirs, place in _places_of_layer(config, has_interleaved_rope):
            places[f"blk.{layer}.{theirs}"] = replace(place, name=f"model.layers.{layer}.{place.name}")
    return places


def check_tensors(source: GgufSource, places: Mapping[str, Place]) -> None:
    """Raises `ConfigError` that names the tensors which are missing, unknown or misshapen."""
    missing = [name for name in places if name not in source.tensors]
    if missing:
        raise ConfigError(
            f"{source.name} lacks {len(missing)} of {len(places)} tensors: {listed(missing)}. It is cut off, or one "
            "part of a split file whose name does not say so; put all parts, under their own names, into one folder"
        )
    unknown = [name for name in source.tensors if name not in places and name != ROPE_FACTORS]
    if unknown:
        raise ConfigError(
            f"{source.name} holds tensors that have no place in a {source.architecture} model: {listed(unknown)}"
        )
    for name, place in places.items():
        if (shape := source.tensors[name].shape) != place.shape:
            raise ConfigError(
                f"{source.name}: tensor {name} has shape {list(shape)}, the metadata asks for {list(place.shape)}"
            )


def kept_kinds(source: GgufSource, places: Mapping[str, Place]) -> dict[str, str]:
    """Module -> kind of its blocks, of the matrices that can be served in the file's own bits."""
    kinds = {place.module: source.tensors[name].kind for name, place in places.items() if place.is_matrix}
    return {module: kind for module, kind in kinds.items() if kind in BLOCK_KINDS}


def written_shapes(places: Mapping[str, Place], kept: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the checkpoint folder."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place in places.values():
        if place.is_matrix and place.module in kept:
            row_bytes = BLOCK_KINDS[kept[place.module]].row_bytes(place.shape[1])
            shapes[f"{place.module}.{GGUF_BLOCKS}"] = (place.shape[0], row_bytes)
        else:
            shapes[place.name] = place.shape
    return shapes


def write_tensors(
    source: GgufSource, places: Mapping[str, Place], folder: Path, kept: Mapping[str, str] | None = None
) -> None:
    """Write all of `places`, holding one file's worth at a time: blocks of the modules in `kept`, numbers of all
    others. Raises `ConfigError` for a kind of quantisation that is not known and for values that are not finite.
    """
    plan = list(_files(source, places))
    weight_map = {}
    for index, names in enumerate(plan, 1):
        file = "model.safetensors" if len(plan) == 1 else f"model-{index:05}-of-{len(plan):05}.safetensors"
        tensors = dict(_written(source, name, places[name], kept or {}) for name in names)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    if len(plan) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))


def _places_of_layer(config: ModelSpec, has_interleaved_rope: bool) -> Iterator[tuple[str, Place]]:
    attention, mlp = config.attention, config.layers[0].mlp  # all layers are alike in these files
    assert isinstance(mlp, MLPSpec)  # no family with experts is read from such files
    hidden, inner, head_dim = config.hidden_size, mlp.intermediate_size, config.head_dim
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    q_rows, kv_rows = num_heads * head_dim, num_kv_heads * head_dim
    norms = [("attn_norm", "input_layernorm", hidden), ("ffn_norm", "post_attention_layernorm", hidden)]
    if attention.qk_norm is not None:
        norms += [(f"attn_{kind}_norm", f"self_attn.{kind}_norm", head_dim) for kind in "qk"]
    for theirs, ours, size in norms:
        yield f"{theirs}.weight", Place(f"{ours}.weight", (size,))
    for theirs, ours, shape, has_bias, heads in (
        ("attn_q", "self_attn.q_proj", (q_rows, hidden), attention.has_qkv_bias, num_heads),
        ("attn_k", "self_attn.k_proj", (kv_rows, hidden), attention.has_qkv_bias, num_kv_heads),
        ("attn_v", "self_attn.v_proj", (kv_rows, hidden), attention.has_qkv_bias, 0),
        ("attn_output", "self_attn.o_proj", (hidden, q_rows), attention.has_o_bias, 0),
        ("ffn_gate", "mlp.gate_proj", (inner, hidden), mlp.has_bias, 0),
        ("ffn_up", "mlp.up_proj", (inner, hidden), mlp.has_bias, 0),
        ("ffn_down", "mlp.down_proj", (hidden, inner), mlp.has_bias, 0),
    ):
        heads = heads if has_interleaved_rope else 0
        yield f"{theirs}.weight", Place(f"{ours}.weight", shape, heads, is_matrix=True)
        if has_bias:
            yield f"{theirs}.bias", Place(f"{ours}.bias", shape[:1], heads)


def _files(source: GgufSource, places: Mapping[str, Place]) -> Iterator[list[str]]:
    """The tensors of each safetensors file, by their names in the GGUF file."""
    names: list[str] = []
    num_bytes = 0
    for name in places:
        tensor = source.tensors[name]
        size = int(np.prod(tensor.shape)) * (2 if tensor.kind in _KEPT_DTYPES else 4)
        if names and num_bytes + size > _MAX_FILE_BYTES:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += size
    yield names


def _written(source: GgufSource, name: str, place: Place, kept: Mapping[str, str]) -> tuple[str, Tensor]:
    """(name, tensor) in the checkpoint folder."""
    tensor = source.tensors[name]
    values = torch.from_numpy(_dequantised(source, name, tensor))
    if not bool(torch.isfinite(values).all()):
        raise ConfigError(f"{source.name}: tensor {name} holds values that are not finite numbers; fetch it again")
    if place.is_matrix and place.module in kept:
        rows = torch.from_numpy(np.array(tensor.packed))
        return f"{place.module}.{GGUF_BLOCKS}", _halves_apart(rows, place)
    return place.name, _halves_apart(values, place).to(_KEPT_DTYPES.get(tensor.kind, torch.float32))


def _halves_apart(rows: Tensor, place: Place) -> Tensor:
    """The rows in the order that the layers want, whatever they are made of."""
    if not place.num_heads:
        return rows.contiguous()
    return rows.unflatten(0, (place.num_heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _dequantised(source: GgufSource, name: str, tensor: GgufTensor) -> np.ndarray:
    """[shape] float32, in memory of its own."""
    from gguf import GGMLQuantizationType, dequantize

    try:
        values = dequantize(tensor.packed, GGMLQuantizationType[tensor.kind])
    except NotImplementedError:
        raise ConfigError(
            f"{source.name}: tensor {name} is {tensor.kind}, which the installed package gguf cannot dequantise; use "
            "another quantisation of the model"
        ) from None
    return np.array(values, dtype=np.float32)
