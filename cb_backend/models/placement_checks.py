"""What a model needs against what its checkpoint's files hold, before the first byte is copied.

Each tensor the model needs is there with the right shape and type, and nothing is there that the model would silently
ignore.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from cb_backend.layers.fp8_linear import QuantizedRows
from cb_backend.layers.packed_linear import ModuleTensor
from cb_backend.layers.placement import FLOATS, Elsewhere, Placement
from cb_backend.layers.written_out_linear import WrittenOutTensor
from cb_backend.models.safetensors_files import StoredTensor
from cb_backend.models.weight_reader import DTYPES, Read, read_tensors
from cb_backend.models.weights import FLOAT_TYPES, FP8_TYPE, PACKED_TYPES, CheckpointFiles, Complain, refuse

_HEAD = "lm_head.weight"
# Old checkpoints carry inv_freq, which follows from the config; scales are of an fp8 cache and read apart.
_IGNORED = re.compile(r".*\.(rotary_emb\.inv_freq|self_attn\.(k_proj\.|v_proj\.)?[kv]_scale)$")


def check_placements(
    placements: Sequence[Placement], source: CheckpointFiles, ignored: str | None = None, complain: Complain = refuse
) -> None:
    """Compare what the model needs with the files' headers; the targets may lie on the device "meta".

    ignored: regular expression of names that need no place. Complains of every tensor which is missing, misshapen or
    unknown, by its name.
    """
    check_tensors(placements, source, complain)
    if not source.is_whole:
        return  # by which names the checkpoint goes is told by tensors that may not have been read
    is_other = re.compile(ignored or "(?!)").match
    known = {placement.name for placement in placements}
    modules = [name.removesuffix("weight") for name in source.quantised]
    scales = {module + kind for module in modules for kind in ("weight_scale", "input_scale")}  # inputs': not needed
    unknown = [
        stored._replace(name=name)
        for name, stored in source.tensors.items()
        if name not in known and name not in scales and not _IGNORED.match(name) and not is_other(name)
    ]
    biases = [stored for stored in unknown if _is_bias_of_few_bits(stored.name, source)]
    zeros = _all_zeros(biases)
    for stored in unknown:
        if stored.name not in zeros:
            fault = f"{stored.path.name}: tensor {stored.name} has no place in the model that config.json describes"
            complain(f"{fault}, and it is not all zeros" if stored in biases else fault)


def _is_bias_of_few_bits(name: str, source: CheckpointFiles) -> bool:
    """AutoGPTQ writes a bias for every matrix that it quantised, zeros where the model has none."""
    is_bias = name.endswith(".bias") and source.tensors[name].dtype in FLOAT_TYPES
    return is_bias and f"{name.removesuffix('bias')}qweight" in source.tensors


def _all_zeros(tensors: Sequence[StoredTensor]) -> set[str]:
    """The names of those that hold nothing but zeros. Reads them."""
    found: set[str] = set()

    def look(name: str, tensor: Tensor) -> None:
        if not bool(tensor.any()):
            found.add(name)

    reads = [Read(stored.name, stored, take=partial(look, stored.name)) for stored in tensors]
    if reads:
        read_tensors(reads, torch.device("cpu"), num_lanes=1)
    return found


def check_tensors(placements: Sequence[Placement], source: CheckpointFiles, complain: Complain = refuse) -> None:
    """What of `check_placements` is of the tensors that the model needs: complains of those that cannot be used."""
    names = sorted({stored.path.name for stored in source.tensors.values()})
    where = names[0] if len(names) == 1 else f"{len(names)} files from {names[0]}" if names else "the checkpoint"
    for placement in placements:
        name = placement.name
        if name not in source.tensors:
            if source.is_whole:  # else nobody knows
                complain(f"tensor {name} is missing in {where}{_hint(name, source)}")
            continue
        if (fault := _wrong_type(placement, source)) is not None:
            complain(fault)
        elif not _fits(placement, source.shape(name)):
            complain(
                f"{source.file_name(name)}: tensor {name} has shape {list(source.shape(name))}, "
                f"config.json asks for {list(placement.shape)}"
            )
        elif name in source.quantised and placement.is_read:
            _check_scales(placement, source, complain)


def _fits(placement: Placement, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has a place's shape. Those of few bits may have dimensions of one or not, as writers please."""
    if isinstance(placement.target, ModuleTensor | WrittenOutTensor | Elsewhere):
        return [size for size in shape if size != 1] == [size for size in placement.shape if size != 1]
    return shape == placement.shape


def _wrong_type(placement: Placement, source: CheckpointFiles) -> str | None:
    """Numbers of another type would be taken for what they are not. None: all is well, or has been told already."""
    name, target, stored = placement.name, placement.target, source.tensors[placement.name]
    if not source.is_packed or stored.dtype not in PACKED_TYPES:
        return None  # `open_checkpoint` has looked at its types
    where = f"{source.file_name(name)}: tensor {name} is {stored.dtype}"
    if isinstance(target, ModuleTensor | WrittenOutTensor):
        if DTYPES[stored.dtype] not in target.dtypes:
            types = " or ".join(kind for kind, dtype in DTYPES.items() if dtype in target.dtypes)
            return f"{where}; {target.reader.name} stores {types}. Write it anew with what quantised the model"
    elif isinstance(target, Tensor | QuantizedRows) and DTYPES[stored.dtype] not in FLOATS:
        return f"{where}; embedding, norms and what is left unquantised are supported in {', '.join(FLOAT_TYPES)}"
    return None


def _hint(missing: str, source: CheckpointFiles) -> str:
    """What may lie behind a tensor that is missing."""
    if any(name.endswith(".attention.wq.weight") for name in source.tensors):
        return ", whose tensors have their makers' own names; fetch the model*.safetensors of the same repository"
    return "; the config does not tie the head (tie_word_embeddings)" if missing == _HEAD else ""


def _check_scales(placement: Placement, source: CheckpointFiles, complain: Complain) -> None:
    """Of a matrix that is fp8 in the file: that its place is too, and that it has one scale, or one a row."""
    name = placement.name
    where, scale = source.file_name(name), f"{name}_scale"
    if not isinstance(placement.target, QuantizedRows):
        complain(
            f"{where}: tensor {name} is {FP8_TYPE}; embedding, head and norms, and what quantization_config leaves "
            "out, are supported unquantised only"
        )
    elif scale not in source.tensors:
        if not source.is_whole:
            return
        complain(f"{where}: tensor {name} is {FP8_TYPE} but there is no {scale}; fetch the checkpoint again")
    elif source.shape(scale) not in ((), (1,), placement.shape[:1], (placement.shape[0], 1)):
        complain(
            f"{source.file_name(scale)}: tensor {scale} has shape {list(source.shape(scale))}; supported are one "
            f"scale, or one for each of the {placement.shape[0]} rows"
        )
