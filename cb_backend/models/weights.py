"""Weights from safetensors files into the model's tensors, one at a time; or random ones.

Everything is checked against the files' headers before the first byte is copied: each tensor the model needs is there
with the right shape, and nothing is there that the model would silently ignore. Knows names, shapes and files; not
what the tensors are for. Pickled files are never read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.fp8_linear import QuantizedRows
from cb_backend.layers.placement import Placement
from cb_backend.models.spec import Names
from cb_backend.models.weight_files import find_weight_files
from cb_backend.support.git_lfs import refuse_lfs_pointer

# Old checkpoints carry inv_freq, which follows from the config; scales are of an fp8 cache and read apart.
HEAD = "lm_head.weight"
_IGNORED = re.compile(r".*\.(rotary_emb\.inv_freq|self_attn\.(k_proj\.|v_proj\.)?[kv]_scale)$")
_FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = "F8_E4M3"
_PACKED = (*_FLOATS, _FP8, "I64", "I32", "I8", "U8")
_DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Which file holds which tensor."""

    files: dict[str, Path]  # tensor name -> file
    shapes: dict[str, tuple[int, ...]]
    quantised: frozenset[str]  # names of the fp8 matrices
    stored_names: dict[str, str] = field(default_factory=dict)  # tensor name -> name in the file, where they differ

    def renamed(self, names: Mapping[str, str]) -> CheckpointFiles:
        """The same tensors, those in `names` called by the names they have there."""
        return CheckpointFiles(
            {names.get(name, name): path for name, path in self.files.items()},
            {names.get(name, name): shape for name, shape in self.shapes.items()},
            frozenset(names.get(name, name) for name in self.quantised),
            {names.get(name, name): self.stored_names.get(name, name) for name in self.files},
        )

    def under(self, names: Names) -> CheckpointFiles:
        """Of a checkpoint of the decoder alone, whose names lack their prefix: the names with it."""
        if any(name.startswith(names.prefix) for name in self.files):
            return self
        return self.renamed({name: names.prefix + name for name in self.files if name != names.head})

    def with_head_as(self, embedding: str, names: Names) -> CheckpointFiles:
        """Of a tied checkpoint, whose one matrix may be stored as the head: the matrix as the embedding."""
        if embedding in self.files or names.head not in self.files:
            return self
        return self.renamed({names.head: embedding})


def open_checkpoint(folder: Path, is_fp8: bool = False, is_packed: bool = False) -> CheckpointFiles:
    """Read the headers of the folder's safetensors files; `is_fp8`: matrices may be; `is_packed`: they are stored in
    types that their readers know. Raises `ConfigError` for a missing or broken file, or a type that is not supported.
    """
    files: dict[str, Path] = {}
    quantised = set()
    shapes: dict[str, tuple[int, ...]] = {}
    for path in find_weight_files(folder):
        try:
            refuse_lfs_pointer(path)
            with safe_open(path, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 - not a dict
                    part = reader.get_slice(name)
                    if part.get_dtype() == _FP8 and is_fp8:
                        quantised.add(name)
                    elif part.get_dtype() not in (_PACKED if is_packed else _FLOATS):
                        raise ConfigError(
                            f"{path.name}: tensor {name} is {part.get_dtype()}; supported are unquantised checkpoints, "
                            "and fp8 (e4m3) ones whose config.json says so"
                        )
                    files[name], shapes[name] = path, tuple(part.get_shape())
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path.name} is not a whole safetensors file ({error}); fetch the checkpoint again"
            ) from None
    return CheckpointFiles(files, shapes, frozenset(quantised))


def fill_from_checkpoint(
    placements: Sequence[Placement], source: CheckpointFiles, progress: Callable[[float], None] | None = None
) -> None:
    """Fill every target from its file, cast to the target's dtype and device. `check_placements` comes before it.

    Raises `ConfigError` for a file that ends early, and for values that cannot be used.
    """
    placements_in: dict[Path, list[Placement]] = {}
    for placement in placements:
        placements_in.setdefault(source.files[placement.name], []).append(placement)
    total, done, quarters = sum(placement.target.numel() for placement in placements), 0, 0
    for path, in_file in placements_in.items():
        try:
            with safe_open(path, framework="pt") as reader:
                for placement in in_file:
                    stored_name = source.stored_names.get(placement.name, placement.name)
                    _fill(placement, reader.get_tensor(stored_name), source)
                    done += placement.target.numel()
                    while progress is not None and quarters < 4 * done // total:
                        quarters += 1
                        progress(quarters / 4)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path.name} cannot be read to its end ({error}); fetch the checkpoint again") from None


def _fill(placement: Placement, tensor: Tensor, source: CheckpointFiles) -> None:
    name, target = placement.name, placement.target
    try:
        if name in source.quantised:
            assert isinstance(target, QuantizedRows)  # as `check_placements` has seen
            target.copy_quantised(placement.prepare(tensor), _scales_of(placement, _read(source, f"{name}_scale")))
        else:
            target.copy_(placement.prepare(tensor))
    except ValueError as error:
        raise ConfigError(f"{source.files[name].name}: tensor {name} {error}") from None


def _scales_of(placement: Placement, scales: Tensor) -> Tensor:
    """Those of the rows that a placement takes: one number, or one a row."""
    if scales.numel() == 1:
        return scales
    if placement.shard is not None and placement.shard.dim == 0:
        scales = placement.shard.of(scales)
    return scales if placement.transform is None else placement.transform(scales)


def _read(source: CheckpointFiles, name: str) -> Tensor:
    with safe_open(source.files[name], framework="pt") as reader:
        tensor: Tensor = reader.get_tensor(source.stored_names.get(name, name))
    return tensor


def read_kv_scale(source: CheckpointFiles, prefix: str, kind: str) -> float:
    """What an fp8 cache divides the keys (kind "k") or values ("v") of an attention layer by; 1.0 if not given."""
    for name in (f"{prefix}.{kind}_scale", f"{prefix}.{kind}_proj.{kind}_scale"):
        if name not in source.files:
            continue
        values = _read(source, name).float().flatten()
        scale = float(values[0]) if values.numel() == 1 else float("nan")
        if not 0 < scale < float("inf"):
            raise ConfigError(
                f"{source.files[name].name}: tensor {name} is {values.tolist()[:4]}; a scale of the KV cache is one "
                "number above 0 a layer. Remove it, or use kv_cache_dtype 'auto'"
            )
        return scale
    return 1.0


def fill_dummy(placements: Iterable[Placement], seed: int) -> None:
    """N(0, 0.02) for matrices and biases, ones for norms: the right shape and cost, no meaning."""
    generator: torch.Generator | None = None
    for name, target, *_ in placements:
        if generator is None:
            generator = torch.Generator(target.device).manual_seed(seed)
        if isinstance(target, Tensor) and "norm" in name:
            target.fill_(1.0)
        else:
            target.normal_(0.0, _DUMMY_STD, generator=generator)


def check_placements(placements: Sequence[Placement], source: CheckpointFiles, ignored: str | None = None) -> None:
    """Compare what the model needs with the files' headers; the targets may lie on the device "meta".

    ignored: regular expression of names that need no place. Raises `ConfigError` that names the first tensor which is
    missing, misshapen or unknown.
    """
    names = sorted({path.name for path in source.files.values()})
    where = names[0] if len(names) == 1 else f"{len(names)} files from {names[0]}" if names else "the checkpoint"
    for placement in placements:
        name = placement.name
        if name not in source.files:
            raise ConfigError(f"tensor {name} is missing in {where}{_hint(name, source)}")
        if source.shapes[name] != placement.shape:
            raise ConfigError(
                f"{source.files[name].name}: tensor {name} has shape {list(source.shapes[name])}, "
                f"config.json asks for {list(placement.shape)}"
            )
        if name in source.quantised:
            _check_scales(placement, source)
    is_other = re.compile(ignored or "(?!)").match
    known = {placement.name for placement in placements}
    modules = [name.removesuffix("weight") for name in source.quantised]
    scales = {module + kind for module in modules for kind in ("weight_scale", "input_scale")}  # inputs': not needed
    for name, path in source.files.items():
        if name not in known and name not in scales and not _IGNORED.match(name) and not is_other(name):
            raise ConfigError(f"{path.name}: tensor {name} has no place in the model that config.json describes")


def _hint(missing: str, source: CheckpointFiles) -> str:
    """What may lie behind a tensor that is missing."""
    if any(name.endswith(".attention.wq.weight") for name in source.files):
        return ", whose tensors have their makers' own names; fetch the model*.safetensors of the same repository"
    return "; the config does not tie the head (tie_word_embeddings)" if missing == HEAD else ""


def _check_scales(placement: Placement, source: CheckpointFiles) -> None:
    """Of a matrix that is fp8 in the file: that its place is too, and that it has one scale, or one a row."""
    name = placement.name
    where, scale = source.files[name].name, f"{name}_scale"
    if not isinstance(placement.target, QuantizedRows):
        raise ConfigError(f"{where}: tensor {name} is {_FP8}; embedding, head and norms are supported unquantised only")
    if scale not in source.files:
        raise ConfigError(f"{where}: tensor {name} is {_FP8} but there is no {scale}; fetch the checkpoint again")
    shape, num_rows = source.shapes[scale], placement.shape[0]
    if shape not in ((), (1,), (num_rows,), (num_rows, 1)):
        raise ConfigError(
            f"{source.files[scale].name}: tensor {scale} has shape {list(shape)}; supported are one scale, or one for "
            f"each of the {num_rows} rows"
        )
