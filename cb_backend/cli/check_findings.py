"""What a checkpoint is and whether it will be served: read the way an engine does, without a GPU and without numbers.

Every refusal is the engine's own text. An engine ends at the first; here all are heard.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cb_backend.contracts.adapters import DEFAULT_MAX_LORAS
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.runner.checkpoint_tokenizer import find_tokenizer, plain_encoder, read_tokenizer_eos_ids
from cb_backend.engine.runner.runner_factory import choose_quantization, resolve_max_model_len
from cb_backend.front_end.text.template_files import read_chat_templates
from cb_backend.layers.placement import Placement
from cb_backend.models.checkpoint import find_checkpoint
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.gguf.outline import GgufOutline, outline_gguf
from cb_backend.models.gguf.tokenizer import write_tokenizer
from cb_backend.models.registry import outline_adapters, outline_model, outline_spec, read_model_config, resolve_dtype
from cb_backend.models.spec import ModelSpec
from cb_backend.models.tasks import resolve_tasks
from cb_backend.models.weights import CheckpointFiles
from cb_backend.support.tokenizer_files import load_tokenizer

_GPU = torch.device("cuda")  # what is decided by the kind of device alone: none is asked
_LAYER_NUMBER = re.compile(r"\.\d+\.")
_LAST_PART = re.compile(r"\.[^.]+$")


@dataclass(slots=True)
class ModuleGroup:
    """Modules of the same place in their layers, which are stored and served alike."""

    modules: str  # `*` for the number of a layer
    count: int
    stored: str  # types in the files
    served: str
    num_parameters: int
    num_bytes: int  # on the device


@dataclass(slots=True)
class TokenizerFindings:
    """The tokenizer that text would go through."""

    folder: str
    num_tokens: int
    chat_templates: list[str]  # names
    ends: dict[int, str] = field(default_factory=dict)  # texts of the tokens that end an answer


@dataclass(slots=True)
class Findings:
    """Of one checkpoint. What could not be found out is None, and a refusal says why."""

    model: str
    kind: str = "safetensors"  # | GGUF
    refusals: list[str] = field(default_factory=list)
    spec: ModelSpec | None = None
    dtype: torch.dtype | None = None  # of what is computed on a GPU
    quantization: str | None = None
    max_model_len: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    groups: list[ModuleGroup] | None = None
    has_own_head: bool | None = None
    tokenizer: TokenizerFindings | None = None
    adapter_bytes: int | None = None  # of the places for adapters on one device; None: they are not enabled

    @property
    def weight_bytes(self) -> int | None:
        return None if self.groups is None else sum(group.num_bytes for group in self.groups)

    @property
    def num_parameters(self) -> int | None:
        return None if self.groups is None else sum(group.num_parameters for group in self.groups)

    def refuse(self, fault: str) -> None:
        if fault not in self.refusals:
            self.refusals.append(fault)

    @contextlib.contextmanager
    def hearing(self) -> Iterator[None]:
        """A refusal ends what stands here, and no more."""
        try:
            yield
        except ConfigError as error:
            self.refuse(str(error))


def examine(config: EngineConfig) -> Findings:
    """Everything that can be said of `config.model` and of the arguments that go with it."""
    found = Findings(config.model)
    with found.hearing():
        path = find_checkpoint(config.model)
        if path.is_file():
            _examine_gguf(found, config, path)
        else:
            _examine_folder(found, config, path)
    return found


def _examine_folder(found: Findings, config: EngineConfig, folder: Path) -> None:
    with found.hearing():
        encode = plain_encoder(find_tokenizer(config, folder)) if config.classifier_from_token else None
        found.spec, _ = resolve_tasks(folder, read_model_config(folder), config, encode)
    _examine_arguments(found, config)
    if found.spec is not None:
        spec, dtype = found.spec, found.dtype or torch.bfloat16
        with found.hearing():
            outline, source = outline_model(folder, spec, dtype, found.quantization, found.refuse)
            found.groups = group_modules(outline, source)
            found.has_own_head = outline.has_own_head
    with found.hearing():
        _examine_tokenizer(found, find_tokenizer(config, folder))


def _examine_gguf(found: Findings, config: EngineConfig, path: Path) -> None:
    found.kind = "GGUF"
    gguf: GgufOutline = outline_gguf(path, found.refuse)
    found.spec = gguf.spec
    _examine_arguments(found, config)
    if gguf.spec is not None:
        with found.hearing():
            outline = outline_spec(gguf.spec, found.dtype or torch.bfloat16, found.quantization)
            found.groups = group_modules(outline, None, gguf.kinds)
            found.has_own_head = outline.has_own_head
    if config.tokenizer is not None:
        with found.hearing():
            _examine_tokenizer(found, find_tokenizer(config, path.parent))
    elif gguf.source is not None and gguf.vocabulary is not None:
        with found.hearing(), tempfile.TemporaryDirectory() as folder:
            write_tokenizer(gguf.source, gguf.vocabulary, Path(folder))
            _examine_tokenizer(found, Path(folder))
            if found.tokenizer is not None:
                found.tokenizer.folder = f"rebuilt from {gguf.source.name}"


def _examine_arguments(found: Findings, config: EngineConfig) -> None:
    """What the engine's arguments make of the specification."""
    spec = found.spec
    if spec is None:
        return
    found.eos_token_ids = spec.eos_token_ids
    found.dtype = resolve_dtype(config.dtype, spec, _GPU)
    with found.hearing():
        found.quantization = choose_quantization(config, spec)
    with found.hearing():
        found.max_model_len = resolve_max_model_len(config, spec)
    if config.enable_lora:
        with found.hearing():
            found.adapter_bytes = _adapter_bytes(spec, found.dtype, config, num_ranks=1)


def _adapter_bytes(spec: ModelSpec, dtype: torch.dtype, config: EngineConfig, num_ranks: int) -> int:
    table = outline_adapters(spec, dtype, config.max_lora_rank, num_ranks)
    return (config.max_loras or DEFAULT_MAX_LORAS) * table.bytes_per_adapter


def adapter_shard_bytes(found: Findings, config: EngineConfig) -> int:
    """Of the places for adapters on each of `tensor_parallel_size` devices. Raises `ConfigError` as `shard_bytes`."""
    if found.adapter_bytes is None or config.tensor_parallel_size == 1:
        return found.adapter_bytes or 0
    assert found.spec is not None
    return _adapter_bytes(found.spec, found.dtype or torch.bfloat16, config, config.tensor_parallel_size)


def shard_bytes(found: Findings, config: EngineConfig) -> int:
    """Of the weights on each of `tensor_parallel_size` devices; the files need not be there yet. Raises `ConfigError`
    where the weights cannot be shared out."""
    assert found.spec is not None
    dtype, size = found.dtype or torch.bfloat16, config.tensor_parallel_size
    if size == 1 and found.weight_bytes is not None:
        return found.weight_bytes
    spreads_experts = config.enable_expert_parallel
    if found.kind == "GGUF" or found.groups is None:
        outline = outline_spec(found.spec, dtype, found.quantization, size, spreads_experts)
    else:
        folder = find_checkpoint(config.model)
        outline, _ = outline_model(
            folder, found.spec, dtype, found.quantization, num_ranks=size, spreads_experts=spreads_experts
        )
    return sum(placement.target.nbytes for placement in outline.placements())


def _examine_tokenizer(found: Findings, folder: Path) -> None:
    backend, settings = load_tokenizer(folder)
    if found.spec is not None:
        ids = read_tokenizer_eos_ids(folder, found.spec.vocab_size)
        found.eos_token_ids = tuple(dict.fromkeys((*found.eos_token_ids, *ids)))
    templates = read_chat_templates(folder, settings)
    ends = {end: backend.id_to_token(end) or "" for end in found.eos_token_ids}
    found.tokenizer = TokenizerFindings(str(folder), backend.get_vocab_size(), list(templates), ends)


def group_modules(
    outline: DecoderForCausalLM, source: CheckpointFiles | None, kinds: dict[str, str] | None = None
) -> list[ModuleGroup]:
    """The model's modules in order, those of all layers together where they are alike. kinds: what a module is stored
    as, where there is no `source`.
    """
    groups: dict[tuple[str, ...], ModuleGroup] = {}
    stored_as: dict[str, str] = {}
    if source is not None:
        stored_as = {name: stored.dtype for name, stored in source.tensors.items()}
    modules: dict[str, list[Placement]] = {}
    for placement in outline.placements():
        modules.setdefault(_LAST_PART.sub("", placement.name), []).append(placement)
    for module, placements in modules.items():
        stored = ", ".join(dict.fromkeys(stored_as.get(each.name, "missing") for each in placements))
        stored = stored if kinds is None else kinds.get(module, "missing")
        served = _served_as(placements[0])
        name = _LAYER_NUMBER.sub(".*.", module)
        group = groups.setdefault((name, stored, served), ModuleGroup(name, 0, stored, served, 0, 0))
        group.count += 1
        group.num_parameters += sum(_num_parameters(each) for each in placements)
        group.num_bytes += sum(each.target.nbytes for each in placements)
    return list(groups.values())


def _served_as(placement: Placement) -> str:
    target = placement.target
    if isinstance(target, Tensor):
        return str(target.dtype).removeprefix("torch.")
    return str(getattr(target, "format_name", f"{8 * target.nbytes / max(1, target.numel()):g} bits"))


def _num_parameters(placement: Placement) -> int:
    """Words that hold several count as so many, scales not at all."""
    target = placement.target
    return target.numel() if isinstance(target, Tensor) else int(getattr(target, "num_weights", target.numel()))
