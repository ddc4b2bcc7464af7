"""What compressed-tensors says of a checkpoint, as llm-compressor and others write it: groups of modules alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cb_backend.layers.stored_matrix import StoredReader
from cb_backend.layers.weight_format import ModuleFormats, PackedFormat, PlainFormat, WeightFormat
from cb_backend.models.packed_formats import (
    Fp8BlockReader,
    IntQuantizedReader,
    Mxfp4Reader,
    Nvfp4Reader,
    PackQuantizedReader,
)
from cb_backend.models.quantization_fields import (
    INPUTS,
    Quantization,
    UnsupportedError,
    block_of,
    exactly,
    group_of,
    in_fp8,
    names_of,
    starting,
)

_IN_ORDER_OF_GROUPS = ("group", "dynamic", True)  # columns are stored as they were; others are sorted already
_OFFLINE = ("weight_input", "weight_output")  # what a rotation did to the weights is in them


def read_compressed_tensors(config: dict[str, Any]) -> Quantization:
    """Raises `UnsupportedError`."""
    _refuse_others(config)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise UnsupportedError("no groups of layers")
    kept = names_of(config, "ignore")
    if len(groups) == 1 and (fp8 := _read_fp8(next(iter(groups.values())), kept)) is not None:
        return fp8
    # A module is of the group that names it, else of one whose expression matches, else of that of all linear layers.
    named: list[tuple[str, WeightFormat]] = []
    matching: list[tuple[str, WeightFormat]] = []
    default: WeightFormat = PlainFormat()
    for group in groups.values():
        weight_format = PackedFormat(_reader_of(config, group))
        for target in names_of(group, "targets"):
            if target == "Linear":
                default = weight_format
            else:
                (matching if target.startswith("re:") else named).append((_targeted(target), weight_format))
    left = [(_targeted(name), PlainFormat()) for name in kept]
    return Quantization("compressed-tensors", ModuleFormats(default, [*left, *named, *matching], INPUTS))


def with_zeros_apart(weight_format: WeightFormat) -> WeightFormat:
    """A format of a checkpoint whose zero points are not packed, which is told by their type alone."""
    reader = weight_format.reader if isinstance(weight_format, PackedFormat) else None
    if not isinstance(reader, PackQuantizedReader):
        return weight_format
    return PackedFormat(replace(reader, are_zeros_packed=False))


def _refuse_others(config: dict[str, Any]) -> None:
    """What may stand beside the groups, and would change the numbers unseen."""
    sparsity = config.get("sparsity_config") or {}
    form = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
    if form != "dense":
        raise UnsupportedError(f"sparse weights of the format {form!r}")
    transforms = config.get("transform_config") or {}
    schemes = (transforms.get("config_groups") or {}) if isinstance(transforms, dict) else transforms
    for scheme in schemes.values() if isinstance(schemes, dict) else [schemes]:
        places = (scheme.get("apply") or []) if isinstance(scheme, dict) else [scheme]
        for place in places if isinstance(places, list) else [places]:
            location = place.get("location") if isinstance(place, dict) else place
            if location not in _OFFLINE:
                raise UnsupportedError(f"a transform_config that turns what layers are given, at {location!r}")


def _reader_of(config: dict[str, Any], group: Any) -> StoredReader:
    """How the modules of a group are stored."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise UnsupportedError(f"a group of layers {str(group)[:60]!r}")
    form = group.get("format") or config.get("format")
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    is_symmetric = bool(weights.get("symmetric", True))
    if (kind, bits) == ("float", 4):
        size = weights.get("group_size")
        if not is_symmetric:
            raise UnsupportedError("4-bit float weights that are not symmetric")
        if (form, size) == ("nvfp4-pack-quantized", 16):
            return Nvfp4Reader(is_modelopt=False)
        if (form, size) == ("mxfp4-pack-quantized", 32):
            return Mxfp4Reader()
        raise UnsupportedError(f"4-bit float weights of the format {form!r} in groups of {size}")
    if (kind, bits, strategy) == ("float", 8, "block"):
        return Fp8BlockReader(block_of(weights.get("block_structure")), scale_name="weight_scale")
    if (kind, bits) == ("float", 8) and strategy in ("tensor", "channel"):
        raise UnsupportedError("fp8 groups beside other groups")
    if kind != "int" or bits not in (4, 8) or strategy not in ("group", "channel"):
        raise UnsupportedError(f"{bits}-bit {kind} weights, a scale a {strategy}")
    if form == "int-quantized":
        if bits != 8 or strategy != "channel" or not is_symmetric:
            raise UnsupportedError(f"{bits}-bit int-quantized weights, a scale a {strategy}, symmetric {is_symmetric}")
        return IntQuantizedReader()
    if form != "pack-quantized":
        raise UnsupportedError(f"format {form!r}")
    size = -1 if strategy == "channel" else group_of(weights, int(bits), "group_size")
    return PackQuantizedReader(int(bits), size, is_symmetric, weights.get("actorder") in _IN_ORDER_OF_GROUPS)


def _read_fp8(group: Any, kept: list[str]) -> Quantization | None:
    """All linear layers in fp8 with a scale a tensor or channel; None where the weights are something else."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or (weights.get("type"), weights.get("num_bits")) != ("float", 8):
        return None
    strategy = weights.get("strategy")
    if strategy == "block":
        return None
    if group.get("targets") != ["Linear"]:
        raise UnsupportedError("fp8 for something else than all linear layers")
    if strategy not in ("tensor", "channel"):
        raise UnsupportedError(f"a scale a {strategy}")
    inputs = group.get("input_activations")
    if not isinstance(inputs, dict):
        raise UnsupportedError("fp8 weights whose inputs stay in 16 bits")
    if (inputs.get("type"), inputs.get("num_bits")) != ("float", 8):
        raise UnsupportedError(f"fp8 weights whose inputs are to be {inputs.get('num_bits')}-bit {inputs.get('type')}")
    return in_fp8((name, _targeted(name)) for name in kept)


def _targeted(name: str) -> str:
    """The modules that compressed-tensors means: an expression is one of a name's start."""
    return starting(name.removeprefix("re:"), name) if name.startswith("re:") else exactly(name)
