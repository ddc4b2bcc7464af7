"""What a checkpoint's `quantization_config` says: the format of every module, or why it cannot be served.

fp8 with one scale a matrix or an output channel is multiplied in fp8, its inputs quantised token by token whatever the
checkpoint proposes. Everything else keeps 16-bit inputs: weights of 4 and 8 bits, fp8 with a scale a block. What a
configuration asks for and nobody here does is refused by its name and value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.packed import MIN_GROUP
from cb_backend.layers.packed_linear import StoredReader
from cb_backend.layers.weight_format import Fp8Format, ModuleFormats, PackedFormat, PlainFormat, WeightFormat
from cb_backend.models.gguf_blocks import BLOCK_KINDS
from cb_backend.models.packed_formats import (
    AwqReader,
    Fp8BlockReader,
    GgufReader,
    GptqReader,
    IntQuantizedReader,
    Mxfp4BlocksReader,
    Mxfp4Reader,
    Nvfp4Reader,
    PackQuantizedReader,
)

FP8 = "fp8"
# What vLLM calls a method whose kernels it chooses by itself.
SYNONYMS = {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt"}
SUPPORTED = (
    "supported are float32, float16 and bfloat16 safetensors; fp8 with a scale a tensor, channel or block; AWQ, GPTQ"
    " and compressed-tensors of 4 and 8 bits; nvfp4 and mxfp4; and GGUF. Use another quantisation of the model, or the"
    " unquantised one with the engine argument quantization 'fp8'"
)
# Modules that may be left as they are where all others are fp8: the head, and routers, which nobody quantises.
_KEPT = re.compile(r"lm_head|(re:)?.*\b(mlp|block_sparse_moe)\\?\.(gate|router|shared_expert_gate)\$?")
_HEAD = r"(.*\.)?lm_head"
# Scales that checkpoints bring for inputs, which are not quantised here, or by themselves.
_INPUTS = r".*\.(input_scale|input_global_scale|input_zero_point)"


class Quantization(NamedTuple):
    """How a checkpoint's matrices are stored."""

    name: str  # fp8 | the method's name
    formats: ModuleFormats | None  # None: all modules in fp8 with a scale a tensor or channel


def read_quantization(config: Any, where: str = "config.json") -> Quantization | None:
    """None for a checkpoint that is not quantised. Raises `ConfigError` that names method and reason."""
    if not config:
        return None
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: 'quantization_config' must be an object, found {config!r}")
    method = config.get("quant_method", "modelopt" if "quant_algo" in config else "unknown")
    reader = METHODS.get(method) if isinstance(method, str) else None
    try:
        if reader is None:
            raise _UnsupportedError("")
        return reader(config)
    except _UnsupportedError as error:
        reason = f" with {error}" if str(error) else ""
        raise ConfigError(f"the checkpoint is quantised ({method}){reason}; {SUPPORTED}") from None


def module_formats(quantization: str | None) -> ModuleFormats:
    """The formats of a model's modules: fp8, or as they come."""
    return ModuleFormats(Fp8Format() if quantization == FP8 else PlainFormat(), [(_HEAD, PlainFormat())])


class _UnsupportedError(Exception):
    """What of a configuration is not supported."""


def _packed(
    name: str, reader: StoredReader, kept: Sequence[str], others: Sequence[tuple[str, WeightFormat]] = ()
) -> Quantization:
    """All modules in one format, but for those that match one of `kept` and those that have another."""
    exceptions = [*((pattern, PlainFormat()) for pattern in kept), *others]
    return Quantization(name, ModuleFormats(PackedFormat(reader), exceptions, _INPUTS))


def _names(config: dict[str, Any], *keys: str) -> list[str]:
    """The first of these lists that is there. Raises `_UnsupportedError` for what is no list of names."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _UnsupportedError(f"{key} {value!r}")
        return value
    return []


def _bits(config: dict[str, Any], key: str, allowed: tuple[int, ...]) -> int:
    bits = config.get(key)
    if bits not in allowed:
        raise _UnsupportedError(f"{key} {bits!r}")
    return int(bits)


def _group(config: dict[str, Any], bits: int, *keys: str) -> int:
    group = next((config[key] for key in keys if config.get(key) is not None), -1)
    if not isinstance(group, int) or group not in (-1, 32, 64, 128, 256, 512, 1024):
        raise _UnsupportedError(f"{keys[0]} {group!r}")
    if -1 < group < MIN_GROUP["int4" if bits == 4 else "int8"]:
        raise _UnsupportedError(f"{bits} bits in groups of {group}")
    return group


def _read_fp8(config: dict[str, Any]) -> Quantization:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _UnsupportedError(f"numbers of the format {config['fmt']!r}")
    kept = _names(config, "ignored_layers", "modules_to_not_convert")
    block = config.get("weight_block_size")
    if block:
        if not isinstance(block, list) or len(block) != 2 or block[1] != 128:
            raise _UnsupportedError(f"a scale a block of {block} weights")
        reader = Fp8BlockReader((int(block[0]), int(block[1])))
        return _packed("fp8_blocks", reader, [_HEAD, *map(_exactly, kept)])
    left_out = [name for name in kept if not _KEPT.fullmatch(name)]
    if left_out:
        raise _UnsupportedError(f"{left_out[0]} left out")
    return Quantization(FP8, None)


def _read_awq(config: dict[str, Any]) -> Quantization:
    for key in ("version", "format", "checkpoint_format"):  # as writers of different years call it
        if str(config.get(key) or "gemm").lower() != "gemm":
            raise _UnsupportedError(f"{key} {config[key]!r}")
    if config.get("zero_point", True) is not True:
        raise _UnsupportedError(f"zero_point {config['zero_point']!r}")
    _bits(config, "bits", (4,))
    # Parts of names, in AWQ, which has no quantised head.
    kept = [_HEAD, *(f".*{re.escape(name)}.*" for name in _names(config, "modules_to_not_convert"))]
    group = _group(config, 4, "group_size", "q_group_size")
    if group == -1:
        raise _UnsupportedError("group_size -1")
    return _packed("awq", AwqReader(group), kept)


def _read_gptq(config: dict[str, Any]) -> Quantization:
    key = next((name for name in ("checkpoint_format", "format") if config.get(name) is not None), "format")
    form = config.get(key, "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _UnsupportedError(f"{key} {form!r}")
    if config.get("pack_dtype", "int32") != "int32":
        raise _UnsupportedError(f"pack_dtype {config['pack_dtype']!r}")

    def reader(settings: dict[str, Any]) -> GptqReader:
        merged = {**config, **settings}
        bits = _bits(merged, "bits", (4, 8))
        return GptqReader(bits, _group(merged, bits, "group_size"), bool(merged.get("sym", True)), form == "gptq_v2")

    kept, others = [] if config.get("lm_head") else [_HEAD], []
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise _UnsupportedError(f"dynamic {dynamic!r}")
    for pattern, settings in dynamic.items():
        wanted = f"{pattern.removeprefix('-:').removeprefix('+:')}.*"  # GPTQModel matches from a name's start on
        if pattern.startswith("-:"):
            kept.append(wanted)
        else:
            others.append((wanted, PackedFormat(reader(settings))))
    return _packed("gptq", reader({}), [*kept, *map(_ending, _names(config, "modules_to_not_convert"))], others)


def _read_compressed_tensors(config: dict[str, Any]) -> Quantization:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _UnsupportedError("no groups of layers")
    kept = _names(config, "ignore")
    if len(groups) == 1 and (fp8 := _compressed_fp8(next(iter(groups.values())), kept)) is not None:
        return fp8
    # A module is of the group that names it, else of one whose expression matches, else of that of all linear layers.
    named: list[tuple[str, WeightFormat]] = []
    matching: list[tuple[str, WeightFormat]] = []
    default: WeightFormat = PlainFormat()
    for group in groups.values():
        weight_format = PackedFormat(_compressed_reader(config, group))
        for target in _names(group, "targets"):
            if target == "Linear":
                default = weight_format
            else:
                (matching if target.startswith("re:") else named).append((_targeted(target), weight_format))
    left = [(_targeted(name), PlainFormat()) for name in kept]
    return Quantization("compressed-tensors", ModuleFormats(default, [*left, *named, *matching], _INPUTS))


def _compressed_reader(config: dict[str, Any], group: Any) -> StoredReader:
    """How the modules of a group are stored."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _UnsupportedError(f"a group of layers {str(group)[:60]!r}")
    form = group.get("format") or config.get("format")
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    is_symmetric = bool(weights.get("symmetric", True))
    if (kind, bits) == ("float", 4):
        size = weights.get("group_size")
        if not is_symmetric:
            raise _UnsupportedError("4-bit float weights that are not symmetric")
        if (form, size) == ("nvfp4-pack-quantized", 16):
            return Nvfp4Reader(is_modelopt=False)
        if (form, size) == ("mxfp4-pack-quantized", 32):
            return Mxfp4Reader()
        raise _UnsupportedError(f"4-bit float weights of the format {form!r} in groups of {size}")
    if kind != "int" or bits not in (4, 8) or strategy not in ("group", "channel"):
        raise _UnsupportedError(f"{bits}-bit {kind} weights, a scale a {strategy}")
    if form == "int-quantized":
        if bits != 8 or strategy != "channel" or not is_symmetric:
            raise _UnsupportedError(f"{bits}-bit int-quantized weights, a scale a {strategy}, symmetric {is_symmetric}")
        return IntQuantizedReader()
    if form != "pack-quantized":
        raise _UnsupportedError(f"format {form!r}")
    size = -1 if strategy == "channel" else _group(weights, int(bits), "group_size")
    return PackQuantizedReader(int(bits), size, is_symmetric, weights.get("actorder") in ("group", True))


def _compressed_fp8(group: Any, kept: list[str]) -> Quantization | None:
    """All linear layers in fp8; None where the weights are something else."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or (weights.get("type"), weights.get("num_bits")) != ("float", 8):
        return None
    if group.get("targets") != ["Linear"]:
        raise _UnsupportedError("fp8 for something else than all linear layers")
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel"):
        raise _UnsupportedError(f"a scale a {strategy}")
    inputs = group.get("input_activations")
    if not isinstance(inputs, dict) or (inputs.get("type"), inputs.get("num_bits")) != ("float", 8):
        raise _UnsupportedError("fp8 weights but other inputs")
    left_out = [name for name in kept if not _KEPT.fullmatch(name)]
    if left_out:
        raise _UnsupportedError(f"{left_out[0]} left out")
    return Quantization(FP8, None)


def _targeted(name: str) -> str:
    """The modules that compressed-tensors means: an expression is one of a name's start."""
    return f"(?:{name.removeprefix('re:')}).*" if name.startswith("re:") else _exactly(name)


def _read_modelopt(config: dict[str, Any]) -> Quantization:
    algorithm = config.get("quant_algo")
    kept = [re.escape(name).replace(r"\*", ".*") for name in _names(config, "ignore", "exclude_modules")]
    if algorithm == "NVFP4":
        return _packed("modelopt", Nvfp4Reader(is_modelopt=True), kept)
    if algorithm == "FP8" and not [name for name in kept if not _KEPT.fullmatch(name)]:
        return Quantization(FP8, None)
    raise _UnsupportedError(f"quant_algo {algorithm!r}")


def _read_gguf(config: dict[str, Any]) -> Quantization:
    """As `gguf.conversion` says it of a file's matrices."""
    modules = config.get("modules")
    if not isinstance(modules, dict) or not modules:
        raise _UnsupportedError("no 'modules', which the conversion of a .gguf file lists; name that file as the model")
    by_kind: dict[str, list[str]] = {}
    for module, kind in modules.items():
        if kind not in BLOCK_KINDS:
            raise _UnsupportedError(f"{module} of the kind {kind!r}")
        by_kind.setdefault(kind, []).append(_exactly(module))
    usual = max(by_kind, key=lambda kind: len(by_kind[kind]))
    others = [("|".join(names), PackedFormat(GgufReader(kind))) for kind, names in by_kind.items() if kind != usual]
    plain = [_exactly(module) for module in config.get("written_out") or {}]
    kept = [] if "lm_head" in modules else [_HEAD]
    return _packed("gguf", GgufReader(usual), [*kept, *plain], others)


def _exactly(name: str) -> str:
    return re.escape(name)


def _ending(name: str) -> str:
    return rf"(.*\.)?{re.escape(name)}(\..*)?"


def _read_mxfp4(config: dict[str, Any]) -> Quantization:
    """The experts, whatever else stands in the configuration: the writer converts nothing but them."""
    experts = [(r".*\.experts(\..*)?", PackedFormat(Mxfp4BlocksReader()))]
    return Quantization("mxfp4", ModuleFormats(PlainFormat(), experts))


METHODS: dict[str, Callable[[dict[str, Any]], Quantization]] = {
    "fp8": _read_fp8,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
    "gguf": _read_gguf,
}
