"""Weights from safetensors files into the model's tensors, one at a time; or random ones.

Everything is checked against the files' headers before the first byte is copied: each tensor the model needs is there
with the right shape, and nothing is there that the model would silently ignore. Knows names, shapes and files; not
what the tensors are for. Pickled files are never read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cb_backend.errors import ConfigError
from cb_backend.layers.fp8_linear import QuantizedRows
from cb_backend.layers.placement import Placement

INDEX = "model.safetensors.index.json"
# Old checkpoints carry inv_freq, which follows from the config; scales are of an fp8 cache and read apart.
HEAD = "lm_head.weight"
_IGNORED = re.compile(r".*\.(rotary_emb\.inv_freq|self_attn\.(k_proj\.|v_proj\.)?[kv]_scale)$")
_FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = "F8_E4M3"
_DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Which file holds which tensor."""

    files: dict[str, Path]  # tensor name -> file
    shapes: dict[str, tuple[int, ...]]
    quantised: frozenset[str]  # names of the fp8 matrices


def open_checkpoint(folder: Path, is_fp8: bool = False) -> CheckpointFiles:
    """Read the headers of the folder's safetensors files; `is_fp8`: matrices may be. Raises `ConfigError` for a
    missing or broken file, or a type that is not supported.
    """
    files: dict[str, Path] = {}
    quantised = set()
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 - not a dict
                    part = reader.get_slice(name)
                    if part.get_dtype() == _FP8 and is_fp8:
                        quantised.add(name)
                    elif part.get_dtype() not in _FLOATS:
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
    placements: Sequence[Placement],
    source: CheckpointFiles,
    progress: Callable[[float], None] | None = None,
    ignored: str | None = None,
) -> None:
    """Fill every target from its file, cast to the target's dtype and device. Raises `ConfigError`, for what the files'
    headers show before anything is copied. ignored: regular expression of names that need no place.
    """
    _check(placements, source, ignored)
    placements_in: dict[Path, list[Placement]] = {}
    for placement in placements:
        placements_in.setdefault(source.files[placement.name], []).append(placement)
    total, done, quarters = sum(placement.target.numel() for placement in placements), 0, 0
    for path, in_file in placements_in.items():
        try:
            with safe_open(path, framework="pt") as reader:
                for placement in in_file:
                    _fill(placement, reader.get_tensor(placement.name), source)
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
            assert isinstance(target, QuantizedRows)  # as `_check` has seen
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
        tensor: Tensor = reader.get_tensor(name)
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


def _weight_files(folder: Path) -> list[Path]:
    """The shards the index names; without one, `model.safetensors` or every safetensors file there is."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError(f"{INDEX} is broken: it has no weight_map; fetch the checkpoint again") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"{INDEX} names {missing[0]}, which is missing; fetch the checkpoint again")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickled:
            raise ConfigError(
                f"the checkpoint holds {pickled[0]}, which is pickled and may run code; convert it to safetensors: "
                "load it with transformers and save_pretrained(folder)"
            )
        raise ConfigError("the checkpoint's folder holds no .safetensors file")
    return files


def _check(placements: Sequence[Placement], source: CheckpointFiles, ignored: str | None) -> None:
    """Raises `ConfigError` that names the first tensor which is missing, misshapen or unknown."""
    names = sorted({path.name for path in source.files.values()})
    where = names[0] if len(names) == 1 else f"{len(names)} files from {names[0]}" if names else "the checkpoint"
    for placement in placements:
        name = placement.name
        if name not in source.files:
            hint = "; the config does not tie the head (tie_word_embeddings)" if name.endswith(HEAD) else ""
            raise ConfigError(f"tensor {name} is missing in {where}{hint}")
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
