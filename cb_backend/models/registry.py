"""From a checkpoint's folder to a model that can run: reads its config, builds its family, fills its weights."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.adapter_table import AdapterTable
from cb_backend.layers.layer_maker import LayerMaker
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.ops import resolve_ops
from cb_backend.models import families, weights
from cb_backend.models.config_reader import ConfigReader
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.formats_of_files import as_in_files
from cb_backend.models.generation_config import read_generation_eos_ids
from cb_backend.models.placement_checks import check_placements
from cb_backend.models.quantization import FP8, module_formats, quantization_values
from cb_backend.models.sharding import check_shares
from cb_backend.models.spec import ModelSpec
from cb_backend.models.stored_dtype import with_stored_dtype
from cb_backend.models.weights import Complain, refuse
from cb_backend.parallel.group import Group, NoGroup, OneOf
from cb_backend.support.json_files import read_json_object


def family_names() -> list[str]:
    """The values of `model_type` that are served: a file each."""
    return sorted(module.name for module in pkgutil.iter_modules(families.__path__))


def read_model_config(folder: Path) -> ModelSpec:
    """Read `config.json`; end-of-sequence ids come from `generation_config.json` where that sets them, and a dtype that
    it does not name is that of the weights' files.

    Raises `ConfigError` for a broken file, an unsupported model_type or an unsupported option.
    """
    values = _read_json(folder / "config.json")
    apart = folder / "hf_quant_config.json"
    if quantization_values(values) is None and apart.is_file():  # as ModelOpt wrote it in 2024
        told = _read_json(apart)
        of_weights = told.get("quantization", told)
        if not isinstance(of_weights, dict) or of_weights.get("quant_algo"):  # else of the cache alone
            values["quantization_config"] = {"quant_method": "modelopt", **told}
    if eos_token_ids := read_generation_eos_ids(folder):
        values["eos_token_id"] = list(eos_token_ids)
    return read_spec(ConfigReader(with_stored_dtype(values, folder)))


def read_spec(reader: ConfigReader) -> ModelSpec:
    """The specification by the family that `model_type` names. Raises `ConfigError` as `read_model_config` does."""
    model_type = reader.get("model_type", str)
    names = family_names()
    if model_type not in names:
        raise ConfigError(f"model_type {model_type!r} is not supported; supported: {', '.join(names)}")
    spec: ModelSpec = importlib.import_module(f"{families.__name__}.{model_type}").read_spec(reader)
    return spec


def resolve_dtype(name: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's dtype on a GPU and float32 on a CPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else spec.dtype
    return getattr(torch, name)


def load_model(
    folder: Path,
    spec: ModelSpec,
    *,
    ops: ModelOps,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    measured: Callable[[int], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    has_kv_scales: bool = False,
    quantization: str | None = None,
    max_model_len: int | None = None,
    adapters: AdapterTable | None = None,
    group: Group | None = None,
    spreads_experts: bool = False,
) -> DecoderForCausalLM:
    """Build the model and fill it from the folder's safetensors, or with random numbers (`load_format` dummy).

    `measured` is called with the bytes that the weights will take on the device, before memory is asked for; it may
    raise. `progress` is called with the bytes that have been read of the files and those to read, at each piece.
    `has_kv_scales`: the cache is to be fp8, so the scales of keys and values that the checkpoint may bring are used
    (1.0 where it has none).
    `quantization` fp8: the layers' matrices are quantised while they are loaded, if they are not in the file.
    `max_model_len`: the longest context that will come; None: the longest the checkpoint is meant for.
    `adapters`: in which the layers' projections make room; its slab is for the caller to make, afterwards.
    `group`: the devices that hold the model together, of which this one gets its part; None: it gets all of it.
    `spreads_experts`: of the experts it gets some whole, and not a part of each.
    Raises `ConfigError` that names file and tensor.
    """
    make = replace(new_maker(spec, ops, dtype, device, quantization, group, spreads_experts), adapters=adapters)
    length = spec.max_context_len if max_model_len is None else max_model_len
    if load_format == "dummy":
        model = DecoderForCausalLM(spec, make, has_own_head=_has_own_head(spec), max_model_len=length)
        weights.fill_dummy(model.placements(), seed, is_shard=make.group.size > 1)
        return model
    spec, make, source, outline = open_weights(folder, spec, make)
    if measured is not None:
        measured(sum(placement.target.nbytes for placement in outline.placements()))
    model = DecoderForCausalLM(spec, make, has_own_head=outline.has_own_head, max_model_len=length)
    weights.fill_from_checkpoint(list(model.placements()), source, progress)
    if spec.tie_word_embeddings and model.lm_head.is_as(model.embed_tokens.weight):
        model.tie_head()
    if has_kv_scales:
        set_kv_scales(model, source)
    return model


def outline_model(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    quantization: str | None = None,
    complain: Complain = refuse,
    num_ranks: int = 1,
    spreads_experts: bool = False,
) -> tuple[DecoderForCausalLM, weights.CheckpointFiles]:
    """(the model of `load_model` on the device "meta": sizes and no numbers, the files it would be filled from).

    `num_ranks`: devices that hold the model together; what is given is the first one's part. `spreads_experts`: as of
    `load_model`.

    `complain` is told of everything that `load_model` would refuse of the files. Raises `ConfigError` where there is
    nothing that could be outlined.
    """
    make = _outline_maker(spec, dtype, quantization, num_ranks, spreads_experts)
    _, _, source, outline = open_weights(folder, spec, make, complain)
    return outline, source


def outline_spec(
    spec: ModelSpec,
    dtype: torch.dtype,
    quantization: str | None = None,
    num_ranks: int = 1,
    spreads_experts: bool = False,
) -> DecoderForCausalLM:
    """The model that a specification describes, on the device "meta", or its part on the first of so many. Raises
    `ConfigError` as building it does."""
    make = _outline_maker(spec, dtype, quantization, num_ranks, spreads_experts)
    return DecoderForCausalLM(spec, make, has_own_head=_has_own_head(spec), max_model_len=1)


def _outline_maker(
    spec: ModelSpec, dtype: torch.dtype, quantization: str | None, num_ranks: int, spreads_experts: bool
) -> LayerMaker:
    ops, device = resolve_ops("torch"), torch.device("meta")
    return new_maker(spec, ops, dtype, device, quantization, OneOf(num_ranks), spreads_experts)


def _has_own_head(spec: ModelSpec) -> bool:
    """As the config says; a file may have one all the same."""
    return spec.has_head and not spec.tie_word_embeddings


def outline_adapters(spec: ModelSpec, dtype: torch.dtype, max_rank: int, num_ranks: int = 1) -> AdapterTable:
    """Where adapters of the model have what, without memory: what their files are checked against (`whole` of it).

    `num_ranks`: devices that hold the model together; what is given is the first one's share. Raises `ConfigError` as
    building the model does.
    """
    if num_ranks == 1:
        # Places depend on formats by what can be cut alone, and what files tell of formats is not known here.
        spec = replace(spec, formats=None, quantization=None)
    table = AdapterTable(max_adapters=1, max_rank=max_rank, dtype=dtype, device=torch.device("meta"))
    make = replace(_outline_maker(spec, dtype, None, num_ranks, spreads_experts=False), adapters=table)
    DecoderForCausalLM(spec, make, has_own_head=not spec.tie_word_embeddings, max_model_len=1)
    return table


def new_maker(
    spec: ModelSpec,
    ops: ModelOps,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None,
    group: Group | None = None,
    spreads_experts: bool = False,
) -> LayerMaker:
    """Raises `ConfigError` where the group's devices cannot share the model."""
    formats, group = spec.formats or module_formats(quantization or spec.quantization), group or NoGroup()
    check_shares(spec, group.size, spreads_experts=spreads_experts)
    return LayerMaker(
        ops=ops, dtype=dtype, device=device, group=group, format_of=formats, spreads_experts=spreads_experts
    )


def open_weights(
    folder: Path, spec: ModelSpec, make: LayerMaker, complain: Complain = refuse
) -> tuple[ModelSpec, LayerMaker, weights.CheckpointFiles, DecoderForCausalLM]:
    """(the specification with the files' names, the maker with their format of the head, the files that hold what the
    model needs, the model without memory). Raises `ConfigError` for files that are missing, and for sizes that no
    model can have.
    """
    is_fp8 = spec.quantization == FP8
    source = weights.open_checkpoint(folder, is_fp8, spec.formats is not None and not is_fp8, complain)
    spec = _as_named(spec, source)
    source = source.under(spec.names)
    if spec.tie_word_embeddings:
        source = source.with_head_as(f"{spec.names.prefix}embed_tokens.weight", spec.names)
    # A tied config with a head in the file: transformers uses that head when it differs from the embedding.
    has_own_head = spec.has_head and (not spec.tie_word_embeddings or source.has_module(spec.names.head_module))
    if spec.quantization is not None:
        make = replace(make, format_of=as_in_files(make.format_of, spec, source))
    # Wrong sizes in a config are named before memory of such sizes is asked for.
    sizes = replace(make, device=torch.device("meta"), adapters=None)
    outline = DecoderForCausalLM(spec, sizes, has_own_head=has_own_head, max_model_len=1)
    ignored = [pattern for pattern in (spec.ignored, make.format_of.ignored) if pattern is not None]
    if not spec.has_head:
        ignored.append(re.escape(spec.names.head_module) + r"\.")
    patterns = "|".join(f"(?:{each})" for each in ignored) or None
    check_placements(list(outline.placements()), source, patterns, complain)
    return spec, make, source, outline


def _as_named(spec: ModelSpec, source: weights.CheckpointFiles) -> ModelSpec:
    """The specification with the names that the files have."""
    for names in (spec.names, *spec.other_names):
        if f"{names.prefix}embed_tokens.weight" in source.tensors:
            return replace(spec, names=names)
    return spec


def set_kv_scales(model: DecoderForCausalLM, source: weights.CheckpointFiles) -> None:
    for attention in (layer.self_attn for layer in model.layers):
        attention.key_scale, attention.value_scale = (
            weights.read_kv_scale(source, attention.name, kind) for kind in "kv"
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path.name} is missing in the checkpoint's folder")
    return read_json_object(path)
