"""Weights from safetensors files into the model's tensors; or random ones.

Everything is checked against the files' headers before the first byte is copied (`placement_checks`). Knows names,
shapes and files; not what the tensors are for. Pickled files are never read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.fp8_linear import QuantizedRows
from cb_backend.layers.placement import Placement, Shard
from cb_backend.models.safetensors_files import StoredTensor, read_header
from cb_backend.models.spec import Names
from cb_backend.models.weight_files import find_weight_files
from cb_backend.models.weight_reader import Progress, Read, read_tensor, read_tensors

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
FP8_TYPE = "F8_E4M3"
PACKED_TYPES = (*FLOAT_TYPES, FP8_TYPE, "F8_E8M0", "I64", "I32", "I8", "U8")
_OF_FEW_BITS = ("weight_scale", "weight_scale_inv", "scales", "qweight", "weight_packed")
_DUMMY_STD = 0.02

Transform = Callable[[Tensor], Tensor]
Complain = Callable[[str], None]  # is told what is wrong; may raise, or go on to hear of the rest


def refuse(fault: str) -> None:
    """Raises `ConfigError` at the first fault."""
    raise ConfigError(fault)


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Which file holds which tensor, and where."""

    tensors: dict[str, StoredTensor]  # by the names that the model has for them
    quantised: frozenset[str]  # names of the fp8 matrices
    is_packed: bool = False  # types are those that readers know, of whatever tensor
    is_whole: bool = True  # False: there is more that could not be read

    def renamed(self, names: Mapping[str, str]) -> CheckpointFiles:
        """The same tensors, those in `names` called by the names they have there."""
        return replace(
            self,
            tensors={names.get(name, name): stored for name, stored in self.tensors.items()},
            quantised=frozenset(names.get(name, name) for name in self.quantised),
        )

    def under(self, names: Names) -> CheckpointFiles:
        """Of a checkpoint of the decoder alone, whose names lack their prefix: the names with it."""
        if any(name.startswith(names.prefix) for name in self.tensors):
            return self
        head = f"{names.head_module}."
        return self.renamed({name: names.prefix + name for name in self.tensors if not name.startswith(head)})

    def has_module(self, module: str) -> bool:
        return any(name.startswith(f"{module}.") for name in self.tensors)

    def has_scales(self, module: str) -> bool:
        """Whether the module's weight is not all there is of it: it is stored in few bits."""
        return any(f"{module}.{suffix}" in self.tensors for suffix in _OF_FEW_BITS)

    def with_head_as(self, embedding: str, names: Names) -> CheckpointFiles:
        """Of a tied checkpoint, whose one matrix may be stored as the head: the matrix as the embedding."""
        if embedding in self.tensors or names.head not in self.tensors:
            return self
        return self.renamed({names.head: embedding})

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def file_name(self, name: str) -> str:
        """Of the file that holds a tensor."""
        return self.tensors[name].path.name


def open_checkpoint(
    folder: Path, is_fp8: bool = False, is_packed: bool = False, complain: Complain = refuse
) -> CheckpointFiles:
    """Read the headers of the folder's safetensors files; `is_fp8`: matrices may be; `is_packed`: they are stored in
    types that their readers know. Complains of a broken file, or a type that is not supported. Raises `ConfigError` for
    files that are missing, and for a quantised checkpoint of which nothing says so.
    """
    tensors: dict[str, StoredTensor] = {}
    is_whole = True
    for path in find_weight_files(folder):
        header = _header(path, complain)
        is_whole = is_whole and header is not None
        tensors |= {stored.name: stored for stored in header or ()}
    quantised = {stored.name for stored in tensors.values() if stored.dtype == FP8_TYPE and is_fp8}
    types = PACKED_TYPES if is_packed else FLOAT_TYPES
    others = [stored for stored in tensors.values() if stored.dtype not in types and stored.name not in quantised]
    if others and not (is_fp8 or is_packed) and any(name.rpartition(".")[2] in _OF_FEW_BITS for name in tensors):
        raise ConfigError(
            f"{others[0].path.name}: tensor {others[0].name} is {others[0].dtype}; the checkpoint is quantised, but "
            "config.json does not say how (quantization_config). Fetch config.json again, or write into it what a "
            "file beside it says, such as quantize_config.json"
        )
    for stored in others:
        complain(
            f"{stored.path.name}: tensor {stored.name} is {stored.dtype}; supported are unquantised checkpoints, and "
            "quantised ones whose config.json says so"
        )
    return CheckpointFiles(tensors, frozenset(quantised), is_packed, is_whole).renamed(_usual_scales(quantised))


def _usual_scales(quantised: Iterable[str]) -> dict[str, str]:
    """How transformers calls the scales of fp8 matrices, and how everybody else does."""
    names: dict[str, str] = {}
    for name in quantised:
        module = name.removesuffix("weight")
        names |= {f"{name}_scale_inv": f"{name}_scale", f"{module}activation_scale": f"{module}input_scale"}
    return names


def _header(path: Path, complain: Complain) -> list[StoredTensor] | None:
    """None: it is broken, and that has been told."""
    try:
        return read_header(path)
    except ConfigError as error:
        complain(str(error))
        return None


def fill_from_checkpoint(
    placements: Sequence[Placement], source: CheckpointFiles, progress: Progress | None = None
) -> None:
    """Fill every target from its file, cast to the target's dtype and device. `check_placements` comes before it.

    Raises `ConfigError` for a file that ends early or changes meanwhile, and for values that cannot be used.
    """
    for placement in placements:
        if placement.is_empty:  # who packs what comes must hear of it all the same
            placement.target.copy_(torch.zeros(placement.target.shape))
    reads = [_read_of(placement, source) for placement in placements if placement.is_read]
    files = {path: index for index, path in enumerate(dict.fromkeys(read.stored.path for read in reads))}
    # A file from its start to its end; but what is packed together comes together, wherever it lies.
    reads.sort(
        key=lambda read: (files[read.stored.path], read.target is None, read.target is None or read.stored.offset)
    )
    if reads:
        read_tensors(reads, placements[0].target.device, progress)


def _read_of(placement: Placement, source: CheckpointFiles) -> Read:
    name, target, shard, transform = placement
    stored = source.tensors[name]
    if shard is not None and shard.dim == 0:
        stored, placement = stored.rows(shard.start, shard.size), placement._replace(shard=None)
    is_copied = placement.shard is None and transform is None and isinstance(target, Tensor) and target.is_contiguous()
    if is_copied:
        assert isinstance(target, Tensor)
        return Read(name, stored, target)
    return Read(name, stored, take=lambda tensor: _fill(placement, shard, tensor, source))


def _fill(placement: Placement, shard: Shard | None, tensor: Tensor, source: CheckpointFiles) -> None:
    """`tensor` has the shard's rows alone where it is one of rows; `placement` has no shard then."""
    name, target = placement.name, placement.target
    try:
        if name in source.quantised:
            assert isinstance(target, QuantizedRows)  # as `check_placements` has seen
            scales = _scales_of(shard, placement.transform, read_tensor(source.tensors[f"{name}_scale"]))
            target.copy_quantised(placement.prepare(tensor), scales)
        else:
            target.copy_(placement.prepare(tensor))
    except ValueError as error:
        raise ConfigError(f"{source.file_name(name)}: tensor {name} {error}") from None


def _scales_of(shard: Shard | None, transform: Transform | None, scales: Tensor) -> Tensor:
    """Those of the rows that a placement takes: one number, or one a row."""
    if scales.numel() == 1:
        return scales
    if shard is not None and shard.dim == 0:
        scales = shard.of(scales)
    return scales if transform is None else transform(scales)


def read_kv_scale(source: CheckpointFiles, prefix: str, kind: str) -> float:
    """What an fp8 cache divides the keys (kind "k") or values ("v") of an attention layer by; 1.0 if not given."""
    for name in (f"{prefix}.{kind}_scale", f"{prefix}.{kind}_proj.{kind}_scale"):
        if name not in source.tensors:
            continue
        values = read_tensor(source.tensors[name]).float().flatten()
        scale = float(values[0]) if values.numel() == 1 else float("nan")
        if not 0 < scale < float("inf"):
            raise ConfigError(
                f"{source.file_name(name)}: tensor {name} is {values.tolist()[:4]}; a scale of the KV cache is one "
                "number above 0 a layer. Remove it, or use kv_cache_dtype 'auto'"
            )
        return scale
    return 1.0


def fill_dummy(placements: Iterable[Placement], seed: int, *, is_shard: bool = False) -> None:
    """N(0, 0.02) for matrices and biases, ones for norms: the right shape and cost, no meaning.

    is_shard: other devices have others of the placements; what they all have gets the same numbers on all.
    """
    generator: torch.Generator | None = None
    for name, target, *_ in placements:
        if generator is None:
            generator = torch.Generator(target.device).manual_seed(seed)
        if is_shard:
            generator.manual_seed(seed + zlib.crc32(name.encode()))
        if isinstance(target, Tensor) and "norm" in name:
            target.fill_(1.0)
        else:
            target.normal_(0.0, _DUMMY_STD, generator=generator)
